"""`largebatch submit --dry-run`: what it says, and that nothing is submitted."""

import json
import re
from pathlib import Path

import pytest

from played import write_commands
from submitting import SMOKE, called

pytestmark = pytest.mark.usefixtures("sbatch")


@pytest.mark.slow
def test_dry_run(output_of):
    options = ["--nodes=2-4", "--cpus-per-task=1"]
    printed = output_of("submit", "gpt_pydoc", *options, "--dry-run", "--batch.global_batch_size=96")
    words = ["--parsable", *options, "--export=ALL", SMOKE, "--batch.global_batch_size=96"]
    assert called()["words"] == ["--test-only", *words]
    assert "\n123\n" in printed  # what Slurm says
    assert [line for line in printed.splitlines() if "under ddp" in line] == [
        f"gpt_pydoc under ddp, nodes x CPU processes per node = {nodes} x 1: causal_lm on {nodes} processes"
        for nodes in (2, 3, 4)
    ]
    assert re.search(r"data\.num_train_samples +[\d,]+ samples found; the recipe expects 3,200\n", printed)
    assert f"\nsbatch --parsable --nodes=2-4 --cpus-per-task=1 --export=ALL {SMOKE}" in printed
    assert not Path("runs").exists()


@pytest.mark.slow
def test_dry_run_tells_what_is_missing(output_of, run_command, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("text.jsonl").write_text('{"text": "a"}\n' * 9000)
    data = {"source": "datasets", "path": "json", "data_files": {"train": "text.jsonl", "eval": "text.jsonl"}}
    data |= {"tokenizer": "bytes", "block_size": 8, "num_train_samples": 900, "num_eval_samples": 10}
    words = ["submit", "gpt_pydoc", "--nodes=2", "--dry-run", "--data", json.dumps(data), "--learning_rate.warmup=null"]
    assert "0.2 MiB of data must still be prepared: a job does that when it starts; " in output_of(*words)
    code, output, _ = run_command(*words, "--data.tokenizer=./none")
    assert code == 1
    assert "error: data.tokenizer: there is no folder './none'" in output


def test_a_dry_run_that_slurm_refuses(sbatch, run_command):
    sbatch("sys.exit('sbatch: error: invalid partition specified: x')")
    code, output, _ = run_command("submit", "gpt_pydoc", "--nodes=2", "--partition=x", "--dry-run")
    assert code == 1
    assert "sbatch: error: invalid partition specified: x\n" in output


def test_a_dry_run_where_slurm_does_not_answer(sbatch, run_command):
    sbatch("sys.exit('sbatch: error: DNS SRV lookup failed\\nsbatch: fatal: no configuration')")
    write_commands(Path("bin"), {"scontrol": "exit 1"})
    code, output, _ = run_command("submit", "gpt_pydoc", "--nodes=2", "--dry-run")
    assert code == 0
    assert output.endswith("because Slurm does not answer; nothing was submitted: sbatch: fatal: no configuration\n")
    assert "DNS" not in output
