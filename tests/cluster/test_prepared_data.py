"""Data that the tasks of an array prepare, one of which is killed; `bench/results/prepared` is of fifty."""

import json

import pytest

import apptainer
from played import write_commands
from preparing_array import PreparingArray

pytestmark = pytest.mark.slow

ROWS = 24_000  # 8 shards for each task: Slurm takes about a second to kill one, in which it must not finish


def test_an_array_of_which_a_task_is_killed(cluster, tmp_path):
    array = PreparingArray(cluster, tmp_path, ROWS)
    job = array.submit()
    array.wait_for(array.has_begun)
    array.kill(job, 1)
    array.wait_for(lambda: array.has_ended(job))
    assert not array.manifests(), array.logs()
    finished = array.shards()
    assert finished

    # The others prepare it in a container.
    container = {"LARGEBATCH_CONTAINER": "apptainer:image.sif", "LARGEBATCH_ENV": ""}
    path = write_commands(tmp_path / "bin", {"apptainer": apptainer.PROGRAM})
    job = array.submit(**container, LARGEBATCH_CONTAINER_MOUNTS=f"{tmp_path}:{tmp_path}", PATH=path)
    array.wait_for(lambda: array.has_ended(job))
    assert "other folders are absent" in array.logs()
    (manifest,) = array.manifests()
    assert finished.items() <= array.shards().items()
    assert array.tokens() == array.expected_tokens()
    assert json.loads(manifest.read_text())["documents"] == ROWS
    assert "samples found; the recipe expects 1,000" in array.logs()
