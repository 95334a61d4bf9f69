"""Before the first step: who prepares, who waits, and how a start ends that was asked to stop."""

import os
import signal
import time

import pytest

import tasks
from jobs import JobFailed, failure_of, run_job
from largebatch.config import load_config
from largebatch.errors import DataError
from largebatch.run import Run
from largebatch.run.command_line import RunOptions, user_errors
from largebatch.system.endings import OwnEnding, read_endings
from paths import PYDOC

pytestmark = pytest.mark.slow


def start(run_dir, *overrides):
    return Run(load_config(PYDOC, overrides), RunOptions(run_dir / "run", recipe=PYDOC))


def sources():
    return tasks.sources("causal_lm")(load_config(PYDOC))


def note_opened(folder):
    (folder / f"opened {os.environ['RANK']}").touch()


def load_in_turns(folder):
    """The first process takes a second; returns when each began and ended."""
    times = [time.monotonic()]

    def open_sources(*_):
        times[0] = time.monotonic()
        if os.environ["RANK"] == "0":
            time.sleep(1)
        times.append(time.monotonic())
        return sources()

    with user_errors(OwnEnding()):
        start(folder).load(open_sources)
    return times


def test_the_first_process_prepares_before_the_others_open_the_data(run_dir, tmp_path):
    """An old stop file is not for this start."""
    run_dir.mkdir()
    (run_dir / "stop").touch()
    os.utime(run_dir / "stop", (time.time() - 60,) * 2)
    (_, ended), (began, _) = run_job(load_in_turns, tmp_path)
    assert began >= ended


def load_and_stop(folder, how):
    def open_sources(*_):
        note_opened(folder)
        time.sleep(0.4)
        if how == "stop file":
            (folder / "run").mkdir(exist_ok=True)
            (folder / "run/stop").touch()
        time.sleep(60)
        return sources()

    with user_errors(OwnEnding()):
        run = start(folder)
        if how == "signal" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        run.load(open_sources)


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ("signal", "SIGTERM", "SIGTERM, before the first step"),
        ("stop file", "STOP_FILE", "the stop file, before the first step"),
        (
            "time",
            "TIME_LIMIT",
            "the end of .*, before the first step; prepare the data before, or give more",
        ),
    ],
)
def test_a_start_ends_on_request_while_data_is_prepared(tmp_path, how, name, reason):
    environment = {"LARGEBATCH_LOGS": str(tmp_path / "logs")}
    if how == "time":
        environment["LARGEBATCH_JOB_END_TIME"] = str(round(time.time()) + 60)
    with pytest.raises(JobFailed, match=f"stopped: by {reason}.*; the same command") as caught:
        run_job(load_and_stop, tmp_path, how, environment=environment)
    assert "exit code 75" in str(caught.value)
    assert not (tmp_path / "opened 1").exists()
    assert not (tmp_path / "run/attempts").exists()
    (ending,) = read_endings(tmp_path / "logs/endings")
    assert (ending.kind, ending.reason.name, ending.rank) == ("stopped", name, 0)


def load_what_cannot_be_used(folder):
    def open_sources(*_):
        note_opened(folder)
        time.sleep(1.5)
        raise DataError("data.path: not this one")

    with user_errors(OwnEnding()):
        start(folder).load(open_sources)


def test_data_that_cannot_be_used_is_told_once_and_nobody_waits(tmp_path):
    report = failure_of(load_what_cannot_be_used, tmp_path)
    assert "error: on rank 0: data.path: not this one" in report
    assert report.count("not this one") == 1
    assert not (tmp_path / "opened 1").exists()


def hang_while_another_loads(folder):
    """The second process stops while the first, which prepares, asks whether all are still there."""
    import largebatch.run.watch.starting as starting

    starting.START_TIMEOUT_SECONDS = 2.0
    with user_errors(OwnEnding()):
        run = start(folder, "--faults.hang_seconds=1")
        if os.environ["RANK"] == "1":
            time.sleep(600)
        run.load(lambda _: time.sleep(600))


def test_a_start_that_hangs_ends_with_its_stack(tmp_path):
    report = failure_of(hang_while_another_loads, tmp_path)
    assert "the process ended without a result" in report
    assert "in hang_while_another_loads" in report
    assert not (tmp_path / "run").exists()
