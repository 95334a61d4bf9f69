"""Lines of metrics.jsonl that wait for others are written when the run fails, whoever says so first."""

import pytest

from largebatch.run.record.record import Record
from largebatch.run.resume import Start
from largebatch.storage.attempts import claim
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding


def failing(folder: RunFolder, attempt, is_main_process: bool) -> OwnEnding:
    """A process that has logged a thousand steps, faster than lines are written, and is about to fail."""
    ending = OwnEnding()
    record = Record(folder, attempt, Start(), 8, is_main_process, print, ending)
    for step in range(1, 1001):
        record.add("metrics", {"step": step})
    return ending


def steps(folder: RunFolder) -> int:
    return len(folder.metrics())


@pytest.mark.parametrize("is_first", [True, False])
def test_lines_of_a_run_that_fails(is_first, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    attempt = claim(folder.attempts_dir, {})
    main = failing(folder, attempt, True)
    other = failing(folder, attempt, False)
    assert steps(folder) < 1000
    if not is_first:
        monkeypatch.setenv("RANK", "1")
        other.fail(KeyError("of another process"))
    monkeypatch.setenv("RANK", "0")
    main.fail(RuntimeError("Connection closed by peer") if not is_first else KeyError("of the main process"))
    assert steps(folder) == 1000
    (event,) = folder.history()
    assert ("main" if is_first else "another") in event["message"]


def test_not_over_those_of_a_later_attempt(tmp_path):
    folder = RunFolder(tmp_path)
    main = failing(folder, claim(folder.attempts_dir, {}), True)
    before = steps(folder)
    claim(folder.attempts_dir, {})
    main.hang("no progress")
    assert steps(folder) == before < 1000
