"""Sweeps as arrays of jobs."""

import itertools
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

import stand_in
from largebatch.storage.files import read_json_lines
from paths import ROOT
from slurm_job import PATIENCE, Job

pytestmark = pytest.mark.slow

STEPS = 60


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
    return found


def test_a_sweep_whose_host_dies_is_complete_and_trains_nothing_twice(cluster, play, tmp_path):
    """The points of 2 rates and 2 seeds; a host loses its network and its processes while it trains some of them."""
    folder = tmp_path / "sweep"
    words = ["sweep", "gpt_pydoc", "--learning_rate.base_lr", "1e-3,2e-3", "--seeds", "2", "--folder", str(folder)]
    words += [f"--train.stop_after_steps={STEPS}", "--slurm", "--nodes=1", "--cpus-per-task=1"]
    hold = tmp_path / "hold"
    programs = {"accelerate": stand_in.program(f"--hold={hold}")}
    environment = {"LARGEBATCH_ENV": str(play(**programs)), "LARGEBATCH_PREFLIGHT": "off"}

    def sweep():
        return cluster.command(sys.executable, "-m", "largebatch", *words, environment=environment, cwd=ROOT)

    number = re.search(r"^job (\d+)$", sweep(), re.MULTILINE)[1]
    points = [folder / point["name"] for point in json.loads((folder / "sweep.json").read_text())["points"]]

    def logs():
        return "\n".join(file.read_text() for file in (folder / "points").glob("*.log"))

    def in_training():
        rows = {index: len(read_json_lines(point / "metrics.jsonl")) for index, point in enumerate(points)}
        return [index for index, steps in rows.items() if steps == stand_in.HELD_AT]

    index = wait_for(in_training, logs)[0]
    host = Job(cluster, f"{number}_{index}", points[index], tmp_path).show("NodeList")
    cluster.cut_off(host)
    on_host = cluster.command("squeue", "--noheader", f"--nodelist={host}", "--states=running", "--format=%K %A")
    on_host = on_host.split()
    killed = {points[int(index)]: job for index, job in zip(on_host[::2], on_host[1::2], strict=True)}
    for point, job in killed.items():
        for pid in Job(cluster, job, point, tmp_path).processes():
            # One may have ended with another.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    hold.touch()
    wait_for(lambda: not cluster.command("squeue", "--noheader").strip(), logs)

    assert len(points) == 4
    for point, seed in zip(points, itertools.cycle((0, 1)), strict=False):
        assert json.loads((point / "status.json").read_text())["outcome"] == "finished", logs()
        assert [line["step"] for line in read_json_lines(point / "metrics.jsonl")] == list(range(1, STEPS + 1))
        # A killed one may not have begun.
        assert len(list((point / "attempts").iterdir())) <= (2 if point in killed else 1)
        assert point.name.endswith(f"_seed={seed}")
    assert len(list((points[index] / "attempts").iterdir())) == 2
    assert "4 points in" in (again := sweep())
    assert "4 of them trained already" in again
