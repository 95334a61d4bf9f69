"""Data that the tasks of an array prepare, one of which is killed; `bench/results/prepared` is of fifty."""

import json

import pytest

import apptainer
from paths import ROOT
from played import write_commands
from slurm_job import wait_for, wait_for_empty_queue

pytestmark = pytest.mark.slow

# Each has about a kilobyte, of which a shard has about 1,000: 8 shards for each task of three. Slurm takes about a
# second to kill one, in which it must not finish, and a shard takes as long.
ROWS = [f"{number} {''.join(map(chr, range(32, 127))) * 10}" for number in range(24_000)]


def test_an_array_of_which_a_task_is_killed(cluster, play, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    data = {"source": "datasets", "path": "json", "data_files": {"train": str(text), "eval": str(text)}}
    data |= {"tokenizer": "bytes", "block_size": 64, "num_train_samples": 1000, "num_eval_samples": 10}
    # Slurm would wait for memory that the hosts do not have.
    options = ("--array=0-2", "--cpus-per-task=1", "--mem-per-cpu=0", "--time=20", f"--output={tmp_path}/%a.log")
    words = ("slurm/prepare.sbatch", "gpt_pydoc", "--data", json.dumps(data | {"eval_split": "train"}))
    settings = {"LARGEBATCH_ENV": str(play()), "HF_HOME": str(tmp_path / "cache")}

    def submit(**changes):
        command = ("sbatch", "--parsable", *options, *words)
        return cluster.command(*command, environment=settings | changes, cwd=ROOT).strip()

    def prepared(pattern):
        return sorted(tmp_path.glob(f"cache/largebatch/*/{pattern}"))

    def logs():
        return "\n".join(file.read_text() for file in sorted(tmp_path.glob("?.log")))

    job = submit()
    wait_for(lambda: prepared(""), logs)
    cluster.command("scancel", "--signal=KILL", "--full", f"{job}_1")
    wait_for_empty_queue(cluster, logs)
    assert not prepared("manifest.json"), logs()
    finished = {path: path.stat().st_mtime_ns for path in prepared("0*.json")}
    assert finished

    # The others prepare it in a container.
    container = {"LARGEBATCH_CONTAINER": "apptainer:image.sif", "LARGEBATCH_ENV": ""}
    path = write_commands(tmp_path / "bin", {"apptainer": apptainer.PROGRAM})
    submit(**container, LARGEBATCH_CONTAINER_MOUNTS=f"{tmp_path}:{tmp_path}", PATH=path)
    wait_for_empty_queue(cluster, logs)
    assert "other folders are absent" in logs()
    (manifest,) = prepared("manifest.json")
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    tokens = b"".join(path.read_bytes() for path in prepared("*.tokens"))
    # 16 bits for each character, and the end-of-text token.
    assert tokens == "".join(f"{row}\0" for row in ROWS).encode("utf-16-le")
    assert json.loads(manifest.read_text())["documents"] == len(ROWS)
    assert "samples found; the recipe expects 1,000" in logs()
