"""`largebatch submit --dry-run`: what it says, and that nothing is submitted."""

import json
import re
from pathlib import Path

import pytest

from submitting import SMOKE, called, submit

pytestmark = pytest.mark.usefixtures("sbatch")


@pytest.mark.slow
def test_dry_run(capsys):
    assert submit("gpt_pydoc", "--nodes=2-4", "--cpus-per-task=1", "--dry-run", "--batch.global_batch_size=96") == 0
    words = ["--parsable", "--nodes=2-4", "--cpus-per-task=1", "--export=ALL", SMOKE, "--batch.global_batch_size=96"]
    assert called()["words"] == ["--test-only", *words]
    printed = capsys.readouterr().out
    assert "\n123\n" in printed  # what Slurm says
    assert [line for line in printed.splitlines() if "under ddp" in line] == [
        f"gpt_pydoc under ddp, nodes x CPU processes per node = {nodes} x 1: causal_lm on {nodes} processes"
        for nodes in (2, 3, 4)
    ]
    assert re.search(r"data\.num_train_samples +[\d,]+ samples found; the recipe expects 3,200\n", printed)
    assert f"\nsbatch --parsable --nodes=2-4 --cpus-per-task=1 --export=ALL {SMOKE}" in printed
    assert not Path("runs").exists()


@pytest.mark.slow
def test_dry_run_tells_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("text.jsonl").write_text('{"text": "a"}\n' * 9000)
    data = {"source": "datasets", "path": "json", "data_files": {"train": "text.jsonl", "eval": "text.jsonl"}}
    data |= {"tokenizer": "bytes", "block_size": 8, "num_train_samples": 900, "num_eval_samples": 10}
    words = ("--nodes=2", "--dry-run", f"--data={json.dumps(data)}", "--learning_rate.warmup=null")
    assert submit("gpt_pydoc", *words) == 0
    assert "0.2 MiB of data must still be prepared: a job does that when it starts; " in capsys.readouterr().out
    assert submit("gpt_pydoc", *words, "--data.tokenizer=./none") == 1
    assert "error: data.tokenizer: there is no folder './none'" in capsys.readouterr().out


def test_a_dry_run_that_slurm_refuses(sbatch, capsys):
    sbatch("sys.exit('sbatch: error: invalid partition specified: x')")
    assert submit("gpt_pydoc", "--nodes=2", "--partition=x", "--dry-run") == 1
    assert "sbatch: error: invalid partition specified: x\n" in capsys.readouterr().out
