"""Sweeps of small runs, stopped and continued."""

import json
import os

import pytest

import jobs  # noqa: F401  # for the server that jobs are forked from
from disks import fill, small_disk
from largebatch.__main__ import main
from largebatch.storage.files import read_json_lines
from largebatch.tools.local_jobs import jobs as server
from largebatch.tools.sweep.start import shares_of_machine
from paths import MAPS
from resuming import TINY_MAPS, Interruption, run_interrupted

pytestmark = pytest.mark.slow

# The list of channels is one value.
TINY = [word.replace("[2]", "[[2]]") for word in TINY_MAPS]
COMMAND = ["sweep", str(MAPS), *TINY, "--checkpoint.every.steps=2", "--batch.global_batch_size=24"]


def history(run_dir):
    return [line for line in read_json_lines(run_dir / "history.jsonl") if line["event"] in ("started", "finished")]


@pytest.mark.parametrize(
    ("at_once", "world_size", "given", "gpus"),
    [
        (2, 2, "0,1,2,3", ["0,1", "2,3"]),
        (3, 1, "4,6,7", ["4", "6", "7"]),
        (1, 1, "4,6", ["4"]),
        # Not enough: all runs see all of them.
        (2, 2, "4,6,7", ["4,6,7", "4,6,7"]),
    ],
)
def test_runs_at_the_same_time_have_gpus_of_their_own(at_once, world_size, given, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 13)
    found = shares_of_machine(at_once, world_size)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in found] == gpus
    assert {share["OMP_NUM_THREADS"] for share in found} == {str(13 // (at_once * world_size))}


def test_it_is_stopped_and_continued_and_trains_nothing_twice(tmp_path, monkeypatch, capsys):
    """The first command is interrupted when a point has finished, and another is killed; one diverges."""
    folder = tmp_path / "sweep"
    rates = ["--learning_rate.base_lr=[0.001, 0.002, 1e12]", "--folder", str(folder)]
    run_job = server.run_job

    def interrupted_after_the_first(*arguments, **options):
        if any(folder.glob("*/summary.json")):
            raise KeyboardInterrupt
        return run_job(*arguments, **options)

    monkeypatch.setattr(server, "run_job", interrupted_after_the_first)
    assert main([*COMMAND, *rates]) == 130
    monkeypatch.undo()
    first, killed, diverged = (folder / f"base_lr={rate}_seed=3" for rate in ("0.001", "0.002", "1000000000000.0"))
    assert [line["event"] for line in history(first)] == ["started", "finished"]
    assert not killed.exists()

    words = json.loads((folder / "sweep.json").read_text())["points"][1]["overrides"]
    failure = run_interrupted(killed, tuple(words), Interruption("kill", 0, 6), "single", 1, recipe=MAPS)
    assert "ended without a result" in failure
    assert main([*COMMAND, *rates]) == 0
    assert [line["event"] for line in history(first)] == ["started", "finished"]
    begun, resumed, ended = history(killed)
    # The checkpoint of step 4 may not have been complete.
    assert resumed["step"] in (2, 4)
    assert (begun["step"], ended["event"], ended["step"]) == (0, "finished", 18)
    printed = capsys.readouterr().out
    assert "3 points in" in printed
    assert ", 1 of them trained already" in printed
    assert "base_lr=1000000000000.0_seed=3: " in printed
    assert "diverged (1)" in printed

    # Another value is trained alone, on two processes.
    rates[0] = "--learning_rate.base_lr=[0.001, 0.002, 1e12, 0.004]"
    assert main([*COMMAND, *rates, "--num-processes=2"]) == 0
    assert "4 points in" in capsys.readouterr().out
    assert [len(history(run)) for run in (first, killed, diverged)] == [2, 3, 1]
    begun, ended = history(folder / "base_lr=0.004_seed=3")
    assert (begun["strategy"], begun["world_size"], ended["event"]) == ("ddp", 2, "finished")


@pytest.mark.root
def test_a_full_disk_ends_it_like_a_run_alone(tmp_path, capsys):
    """Before a run can log anything, and when one cannot be finished; the same command goes on when there is room."""
    with small_disk(tmp_path / "disk", megabytes=4) as disk:
        command = [*COMMAND, "--folder", str(disk / "sweep")]
        for left in (0, 2**16):
            filler = fill(disk, left)
            assert main(command) == 74
            printed = capsys.readouterr()
            assert "No space left on device" in printed.err
            assert "the same command tries again" in printed.err
            assert "Traceback" not in printed.err
            filler.unlink()
        assert main(command) == 0
