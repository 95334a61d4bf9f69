"""Sweeps as arrays of jobs; `bench/results/sweep_array` is of a larger one, with training."""

import os
import re
import signal
import sys
from contextlib import suppress

import pytest

import stand_in
from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from paths import ROOT
from slurm_job import Job, wait_for, wait_for_empty_queue

pytestmark = pytest.mark.slow

STEPS = 60


def test_a_sweep_whose_host_dies_is_complete_and_trains_nothing_twice(cluster, play, tmp_path):
    """The points of 2 rates and 2 seeds; a host loses its network and its processes while it trains some of them.

    The command is repeated while they train.
    """
    folder = tmp_path / "sweep"
    hold = tmp_path / "hold"
    programs = {"accelerate": stand_in.program(f"--hold={hold}")}
    environment = {"LARGEBATCH_ENV": str(play(**programs)), "LARGEBATCH_PREFLIGHT": "off"}
    words = ["sweep", "gpt_pydoc", "--learning_rate.base_lr=1e-3,2e-3", "--seeds=2", f"--folder={folder}"]
    words += [f"--train.stop_after_steps={STEPS}", "--slurm", "--nodes=1", "--cpus-per-task=1"]

    def sweep():
        return cluster.command(sys.executable, "-m", "largebatch", *words, environment=environment, cwd=ROOT)

    output = sweep()
    assert "4 points in" in output
    assert output.endswith("when all points are trained, the same command shows the result\n")
    number = re.search(r"^job (\d+)$", output, re.MULTILINE)[1]
    points = [folder / point["name"] for point in read_object(folder / "sweep.json")["points"]]

    def job(index):
        log = folder / f"points/{index}.log"
        return Job(cluster, Job(cluster, f"{number}_{index}", points[index], log).show("JobId"), points[index], log)

    def logs():
        return "\n".join(file.read_text() for file in folder.glob("points/*.log"))

    def in_training():
        steps = [len(read_json_lines(point / "metrics.jsonl")) for point in points]
        return [index for index, step in enumerate(steps) if step == stand_in.HELD_AT]

    index = wait_for(in_training, logs)[0]
    output = sweep()
    assert "0 of them trained already, 4 in Slurm's queue\n" in output
    assert "\njob " not in output
    host = job(index).show("NodeList")
    cluster.cut_off(host)
    on_host = ("--states=running", f"--nodelist={host}")
    lost = {int(each) for each in cluster.command("squeue", "--noheader", *on_host, "--format=%K").split()}
    for each in lost:
        for pid in job(each).processes():
            # One may have ended with another.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    hold.touch()
    wait_for_empty_queue(cluster, logs)

    assert [point.name[-7:] for point in points] == ["_seed=0", "_seed=1"] * 2
    attempts = []
    for place, point in enumerate(points):
        run = RunFolder(point)
        assert run.ending().kind == "finished", logs()
        assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
        # A killed one may not have begun.
        attempts.append(len(run.attempts()))
        assert attempts[-1] <= (2 if place in lost else 1)
    assert attempts[index] == 2
