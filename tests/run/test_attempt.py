"""Of all starts of a run only the latest may publish."""

import contextlib
import errno
import json
import os

import pytest

from largebatch.errors import TrainingFailed
from largebatch.storage.attempts import claim, is_restart_of, job_start, latest_attempt


@pytest.fixture
def attempts(run_dir):
    run_dir.mkdir()
    return run_dir / "attempts"


def records(folder):
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def test_attempts_are_numbered_from_one_and_recorded(attempts):
    assert latest_attempt(attempts) is None
    claim(attempts, {"world_size": 2})
    second = claim(attempts, {"world_size": 4})
    assert second.name == f"0002_{second.token}"
    assert list(records(attempts)) == ["0001.json", "0002.json"]
    record = records(attempts)["0002.json"]
    assert record.items() >= {"attempt": 2, "token": second.token, "world_size": 4, "pid": os.getpid()}.items()
    assert latest_attempt(attempts) == record


def test_numbers_go_on_behind_the_largest(attempts):
    attempts.mkdir()
    for name in ("0007.json", "12345.json", "0008.json.bak", ".0123abcd.tmp", "99999.txt", "123.json"):
        (attempts / name).write_text('{"attempt": 12345, "token": "x", "host": "h"}')
    assert latest_attempt(attempts)["attempt"] == 12345
    assert claim(attempts, {}).number == 12346


def test_numbers_that_others_take_at_the_last_moment_are_left_to_them(attempts, monkeypatch):
    link = os.link
    others = []

    def overtaken(source, target):
        if len(others) < 2:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(os, "link", link)
                others.append(claim(attempts, {}).token)
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    attempt = claim(attempts, {})
    assert attempt.number == 3
    attempt.check()
    assert [record["token"] for record in records(attempts).values()] == [*others, attempt.token]


def test_a_record_is_whole_and_on_the_disk_before_its_name_appears(attempts, monkeypatch):
    link = os.link
    fsync = os.fsync
    synced = []
    linked = []

    def note(file):
        synced.append(os.fstat(file).st_ino)
        fsync(file)

    def look(source, target):
        linked.append((json.loads(source.read_text())["attempt"], source.stat().st_ino in synced))
        link(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "link", look)
    claim(attempts, {})
    assert linked == [(1, True)]


def test_a_file_system_that_does_not_answer_for_a_moment_is_no_later_attempt(attempts, monkeypatch):
    attempt = claim(attempts, {})
    iterdir = type(attempts).iterdir

    def fail_once(path):
        monkeypatch.setattr(type(attempts), "iterdir", iterdir)
        raise OSError(errno.ESTALE, "of the storage", path)

    monkeypatch.setattr(type(attempts), "iterdir", fail_once)
    with contextlib.suppress(OSError):
        attempt.check()


def test_a_later_attempt_ends_all_earlier_ones(attempts):
    first = claim(attempts, {})
    first.check()
    second = claim(attempts, {})
    second.check()
    with pytest.raises(TrainingFailed, match=r"attempt 2 on .* has taken over .*/run; this one, attempt 1 on"):
        first.check()


def test_a_run_that_was_moved_aside_is_over(attempts):
    first = claim(attempts, {})
    attempts.parent.rename(attempts.parent.with_name("run.1"))
    with pytest.raises(TrainingFailed, match="another run has taken over"):
        first.check()
    attempts.parent.mkdir()
    second = claim(attempts, {})
    assert second.number == first.number
    second.check()
    with pytest.raises(TrainingFailed, match=r"attempt 1 on .* has taken over"):
        first.check()


@pytest.mark.parametrize(
    ("job", "restarts", "is_restart"),
    [("7", "1", True), ("7", "12", True), ("7", "", False), ("8", "1", False), ("", "1", False)],
)
def test_a_requeued_job_is_a_restart_of_its_earlier_attempts(job, restarts, is_restart, monkeypatch):
    monkeypatch.setenv("LARGEBATCH_JOB_ID", "7")
    monkeypatch.setenv("LARGEBATCH_RESTART", "")
    earlier = job_start()
    monkeypatch.setenv("LARGEBATCH_JOB_ID", job)
    monkeypatch.setenv("LARGEBATCH_RESTART", restarts)
    assert is_restart_of(earlier) is is_restart
