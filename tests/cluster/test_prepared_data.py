"""Data that the tasks of an array prepare, one of which is killed."""

import json
import time
from pathlib import Path

import pytest

from paths import PYDOC, ROOT

pytestmark = pytest.mark.slow

PATIENCE = 600.0
LINE = "".join(map(chr, range(32, 127))) * 10


@pytest.fixture
def text(tmp_path) -> Path:
    """Twelve megabytes: twelve shards, of which one takes about a second."""
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number} {LINE}"}) + "\n" for number in range(12_000)))
    return file


@pytest.fixture
def prepare(cluster, play, tmp_path, text):
    """Submits the shipped script as an array of three, and returns the job's number."""
    data = {"source": "datasets", "path": "json", "data_files": {"train": str(text), "eval": str(text)}}
    data |= {"tokenizer": "bytes", "block_size": 64, "num_train_samples": 1000, "num_eval_samples": 10}
    settings = {"LARGEBATCH_ENV": str(play()), "HF_HOME": str(tmp_path / "cache")}
    # Slurm would wait for memory that the hosts do not have.
    options = ("--array=0-2", "--cpus-per-task=1", "--mem-per-cpu=0", "--time=20", f"--output={tmp_path}/%a.log")
    words = (str(PYDOC.relative_to(ROOT)), "--data", json.dumps(data | {"eval_split": "train"}))

    def submit() -> str:
        command = ("sbatch", "--parsable", *options, "slurm/prepare.sbatch", *words)
        return cluster.command(*command, environment=settings, cwd=ROOT).strip()

    return submit


def wait_for(condition, what) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def test_an_array_of_which_a_task_is_killed(cluster, prepare, tmp_path, text):
    def logs() -> str:
        return "\n".join(file.read_text() for file in sorted(tmp_path.glob("?.log")))

    def has_ended(job: str) -> bool:
        return not cluster.command("squeue", "--noheader", f"--jobs={job}").strip()

    def shards() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/largebatch/*/0*.json")}

    job = prepare()
    wait_for(shards, logs)
    cluster.command("scancel", "--signal=KILL", "--full", f"{job}_1")
    wait_for(lambda: has_ended(job), logs)
    assert not list(tmp_path.glob("cache/largebatch/*/manifest.json")), logs()
    finished = shards()

    job = prepare()
    wait_for(lambda: has_ended(job), logs)
    (manifest,) = tmp_path.glob("cache/largebatch/*/manifest.json")
    assert finished.items() <= shards().items()
    tokens = b"".join((manifest.parent / f"{number:05d}.tokens").read_bytes() for number in range(len(shards())))
    rows = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    # In 16 bits each.
    assert tokens == "".join(f"{row}\0" for row in rows).encode("utf-16-le")
    assert json.loads(manifest.read_text())["documents"] == len(rows)
    assert "samples are prepared; the recipe uses 1,000" in logs()
