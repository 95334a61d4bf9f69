"""The last line of history.jsonl with a kind tells how the run has ended, whoever says so first."""

import pytest

from largebatch.storage.attempts import claim
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding
from recording import begin


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_cause_is_told(is_first, tmp_path, monkeypatch):
    main = OwnEnding()
    other = OwnEnding()
    begin(tmp_path, other, begin(tmp_path, main).attempt)
    if not is_first:
        monkeypatch.setenv("RANK", "1")
        other.fail(KeyError("of another process"))
    monkeypatch.setenv("RANK", "0")
    main.fail(RuntimeError("Connection closed by peer") if not is_first else KeyError("of the main process"))
    started, ended = RunFolder(tmp_path).history()
    assert (started["event"], ended["event"]) == ("started", "failed")
    assert ("main" if is_first else "another") in ended["message"]


def test_a_later_attempt_has_its_history_for_itself(tmp_path):
    main = OwnEnding()
    begin(tmp_path, main)
    folder = RunFolder(tmp_path)
    claim(folder.attempts_dir, {})
    main.hang("no progress")
    assert [line["event"] for line in folder.history()] == ["started"]
