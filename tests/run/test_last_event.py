"""The last line of history.jsonl tells how the run has ended, whoever says so first."""

import pytest

from largebatch.run.record.record import Record
from largebatch.run.resume import Start
from largebatch.storage.attempts import claim
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding


def begin(folder: RunFolder, attempt, is_main_process: bool) -> OwnEnding:
    ending = OwnEnding()
    Record(folder, attempt, Start(), 8, is_main_process, print, ending)
    return ending


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_cause_is_told(is_first, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    attempt = claim(folder.attempts_dir, {})
    main = begin(folder, attempt, True)
    other = begin(folder, attempt, False)
    if not is_first:
        monkeypatch.setenv("RANK", "1")
        other.fail(KeyError("of another process"))
    monkeypatch.setenv("RANK", "0")
    main.fail(RuntimeError("Connection closed by peer") if not is_first else KeyError("of the main process"))
    (event,) = folder.history()
    assert event["event"] == "failed"
    assert ("main" if is_first else "another") in event["message"]


def test_a_later_attempt_has_its_history_for_itself(tmp_path):
    folder = RunFolder(tmp_path)
    main = begin(folder, claim(folder.attempts_dir, {}), True)
    claim(folder.attempts_dir, {})
    main.hang("no progress")
    assert folder.history() == []
