"""Data that the tasks of an array prepare, in a container; `bench/results/prepared` is of fifty."""

import json

import pytest

import apptainer
from paths import ROOT
from played import write_commands
from slurm_job import wait_for_empty_queue
from small_data import rows_in

pytestmark = pytest.mark.slow

# Each has about a kilobyte, of which a shard has about 1,000: a shard for each task of three.
ROWS = [f"{number} {''.join(map(chr, range(32, 127))) * 10}" for number in range(3_000)]


def test_an_array(cluster, tmp_path):
    data = rows_in(tmp_path / "text.jsonl", [{"text": row} for row in ROWS])
    data |= {"tokenizer": "bytes", "block_size": 64, "num_train_samples": 1000, "eval_split": "train"}
    # Slurm would wait for memory that the hosts do not have.
    options = ("--array=0-2", "--cpus-per-task=1", "--mem-per-cpu=0", "--time=20", f"--output={tmp_path}/%a.log")
    words = ("slurm/prepare.sbatch", "gpt_pydoc", "--data", json.dumps(data))
    settings = {
        "HF_HOME": str(tmp_path / "cache"),
        "LARGEBATCH_CONTAINER": "apptainer:image.sif",
        "LARGEBATCH_CONTAINER_MOUNTS": f"{tmp_path}:{tmp_path}",
        "PATH": write_commands(tmp_path / "bin", {"apptainer": apptainer.PROGRAM}),
    }
    cluster.command("sbatch", *options, *words, environment=settings, cwd=ROOT)

    def logs():
        return "\n".join(file.read_text() for file in sorted(tmp_path.glob("?.log")))

    wait_for_empty_queue(cluster, logs)
    assert "other folders are absent" in logs()
    (manifest,) = tmp_path.glob("cache/largebatch/*/manifest.json")
    assert json.loads(manifest.read_text())["documents"] == len(ROWS)
    tokens = b"".join(path.read_bytes() for path in sorted(manifest.parent.glob("*.tokens")))
    # 16 bits for each character, and the end-of-text token.
    assert tokens == "".join(f"{row}\0" for row in ROWS).encode("utf-16-le")
    assert "samples found; the recipe expects 1,000" in logs()
