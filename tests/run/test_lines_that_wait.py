"""Lines of metrics.jsonl that wait for others are written when the run fails, whoever says so first."""

import pytest

from largebatch.run.record import record
from largebatch.run.record.folder import RunFolder
from largebatch.run.record.record import Record, _of_this_process, report_failure
from largebatch.run.resume import Start
from largebatch.storage.attempts import claim
from largebatch.storage.files import read_json_lines


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # However slow the machine is.
    monkeypatch.setattr(record, "SECONDS_UNTIL_WRITTEN", 1e6)
    yield RunFolder(tmp_path)
    _of_this_process.clear()


def record_of(folder: RunFolder, attempt, is_main_process: bool) -> Record:
    return Record(folder, attempt, Start(), 8, is_main_process, print)


def steps(folder: RunFolder) -> list[int]:
    return [line["step"] for line in read_json_lines(folder.metrics_file)]


@pytest.mark.parametrize("is_first", [True, False])
def test_lines_of_a_run_that_fails(is_first, folder):
    attempt = claim(folder.attempts_dir, {})
    main = record_of(folder, attempt, is_main_process=True)
    for step in (1, 2, 3):
        main.add("metrics", {"step": step})
    assert steps(folder) == [1]
    if not is_first:
        other = record_of(folder, attempt, is_main_process=False)
        other.fail("another process", "communication")
    main.fail("the main process", "error", "KeyError")
    assert steps(folder) == [1, 2, 3]
    (event,) = read_json_lines(folder.history_file)
    assert event["message"] == ("the main process" if is_first else "another process")


def test_not_over_those_of_a_later_attempt(folder):
    main = record_of(folder, claim(folder.attempts_dir, {}), is_main_process=True)
    for step in (1, 2):
        main.add("metrics", {"step": step})
    claim(folder.attempts_dir, {})
    report_failure("the main process", "hang")
    assert steps(folder) == [1]
