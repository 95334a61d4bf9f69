"""Sweeps as arrays of jobs; `bench/results/sweep_array` is of a larger one, with training, whose host dies."""

import re
import sys

import pytest

import stand_in
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from paths import ROOT
from slurm_job import wait_for, wait_for_empty_queue

pytestmark = pytest.mark.slow

STEPS = 60


def test_a_sweep_is_complete_and_trains_nothing_twice(cluster, play, tmp_path):
    """The points of 2 rates and 2 seeds. While they train, the command is repeated, and one of them is requeued."""
    folder = tmp_path / "sweep"
    hold = tmp_path / "hold"
    programs = {"accelerate": stand_in.program(f"--hold={hold}")}
    environment = {"LARGEBATCH_ENV": str(play(**programs)), "LARGEBATCH_PREFLIGHT": "off"}
    words = ["sweep", "gpt_pydoc", "--learning_rate.base_lr=1e-3,2e-3", "--seeds=2", f"--folder={folder}"]
    words += [f"--train.stop_after_steps={STEPS}", "--slurm", "--nodes=1", "--cpus-per-task=1"]

    def sweep():
        return cluster.command(sys.executable, "-m", "largebatch", *words, environment=environment, cwd=ROOT)

    def logs():
        return "\n".join(file.read_text() for file in folder.glob("points/*.log"))

    output = sweep()
    assert "4 points in" in output
    assert output.endswith("when all points are trained, the same command shows the result\n")
    number = re.search(r"^job (\d+)$", output, re.MULTILINE)[1]
    points = [RunFolder(folder / point["name"]) for point in read_object(folder / "sweep.json")["points"]]
    wait_for(lambda: len(points[2].metrics()) == stand_in.HELD_AT, logs)
    output = sweep()
    assert "0 of them trained already, 4 in Slurm's queue\n" in output
    assert "\njob " not in output
    cluster.command("scontrol", "requeue", f"{number}_2")
    hold.touch()
    wait_for_empty_queue(cluster, logs)
    assert [len(point.attempts()) for point in points] == [1, 1, 2, 1], logs()
    for point in points:
        assert point.ending().kind == "finished", logs()
        assert [line["step"] for line in point.metrics()] == list(range(1, STEPS + 1))
