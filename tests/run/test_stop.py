"""Requests to stop, and the end of a job's time."""

import errno
import os
import signal

import pytest

from largebatch.errors import LaunchError
from largebatch.plan.contract import STEPS_TO_STOP
from largebatch.run.record.folder import OwnFolder
from largebatch.run.watch.stop import REASONS, StopRequests
from largebatch.system.endings import StopReason


def named(requests):
    return REASONS[requests.requested()]


def looking_in(folder):
    return StopRequests({StopReason.STOP_FILE: folder / "stop", StopReason.BATCH_SCRIPT: folder / "stop.7"}, None, 0)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_signals_are_noted_only_while_it_listens(number):
    requests = StopRequests({}, None, 0)
    before = signal.getsignal(number)
    requests.listen()
    assert named(requests) is None
    os.kill(os.getpid(), number)
    assert named(requests) == number.name
    requests.close()
    assert signal.getsignal(number) is before
    assert named(requests) == number.name


def test_stop_files_are_looked_for_once_a_second(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    requests = looking_in(tmp_path)
    assert named(requests) is None
    (tmp_path / "stop.7").touch()
    assert named(requests) is None
    now[0] += 1
    assert named(requests) == StopReason.BATCH_SCRIPT
    # A person's request counts for more: it says that the job shall not be restarted.
    (tmp_path / "stop").touch()
    now[0] += 1
    assert named(requests) == StopReason.STOP_FILE
    assert named(StopRequests({}, None, 0)) is None


@pytest.mark.parametrize(
    ("end", "now", "reason"),
    [
        ("2000", 1699.9, None),
        ("2000", 1700, StopReason.TIME_LIMIT),
        ("", 1e10, None),
    ],
)
def test_the_end_of_the_time_limit_less_the_margin(end, now, reason, monkeypatch):
    monkeypatch.setenv("LARGEBATCH_JOB_END_TIME", end)
    monkeypatch.setattr("time.time", lambda: now)
    requests = StopRequests({}, None, 300)
    assert named(requests) == reason


@pytest.mark.parametrize("end", ["Unknown", "1.8e9", "-1", "2026-12-01T12:00:00"])
def test_an_end_of_the_time_limit_that_is_no_number_is_refused(end, monkeypatch):
    """The job would be killed without a checkpoint."""
    monkeypatch.setenv("LARGEBATCH_JOB_END_TIME", end)
    with pytest.raises(LaunchError, match=f"^LARGEBATCH_JOB_END_TIME is '{end}', not a whole number"):
        StopRequests({}, None, 300)


@pytest.mark.parametrize("asked_in", [0, 3])
def test_a_vote_is_read_while_later_ones_are_under_way(asked_in, tmp_path, monkeypatch):
    """A request during a step is in the next step's vote, which is read two steps later: the plan says at most 4."""
    votes = []
    read = []
    now = [100.0]
    monkeypatch.setattr("time.time", lambda: now[0])

    def all_max(number):
        votes.append(number)
        place = len(votes) - 1
        return lambda: read.append(place) or votes[place]

    requests = StopRequests({StopReason.STOP_FILE: tmp_path / "stop"}, all_max, 0)
    reasons = []
    for step in range(10):
        requests.vote()
        if step == asked_in:
            (tmp_path / "stop").touch()
        now[0] += 1
        reasons.append(requests.result())
        assert read == [*range(max(0, step - 1))]
    assert reasons.index(StopReason.STOP_FILE) == asked_in + 3 < asked_in + STEPS_TO_STOP
    requests.end_votes()
    assert read == [*range(10)]


def test_a_look_that_fails_has_seen_nothing(tmp_path, monkeypatch):
    now = [100.0]
    stat = os.stat
    monkeypatch.setattr("time.time", lambda: now[0])
    requests = looking_in(tmp_path)
    (tmp_path / "stop").touch()

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "stat", fail)
    seen = named(requests)
    monkeypatch.setattr(os, "stat", stat)
    assert seen is None
    now[0] += 1
    assert named(requests) == StopReason.STOP_FILE


def test_a_stop_file_that_cannot_be_looked_at_does_not_hide_another(tmp_path):
    (tmp_path / "stop").symlink_to("x" * 300)
    (tmp_path / "stop.7").touch()
    assert named(looking_in(tmp_path)) == StopReason.BATCH_SCRIPT


def test_a_folder_or_a_loop_in_place_of_the_stop_file_is_no_request(tmp_path):
    (tmp_path / "stop").mkdir()
    (tmp_path / "stop.7").symlink_to("stop.7")
    assert named(looking_in(tmp_path)) is None
    OwnFolder(tmp_path).hold()
    folder = OwnFolder(tmp_path)
    folder.forget_requests()
    assert (tmp_path / "stop").is_dir()
