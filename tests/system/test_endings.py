"""Each process writes its own ending, once, for the job's start and for the run, and anybody can read them."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from largebatch.storage.attempts import claim
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import Ending, OwnEnding, StopReason, read_endings
from largebatch.system.failures import Kind


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LARGEBATCH_NODE", "h7")
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path / "logs"))
    return tmp_path / "logs"


@pytest.fixture
def attempt(tmp_path):
    return claim(tmp_path / "attempts", {})


def begun(attempt):
    ending = OwnEnding()
    ending.begin(attempt.endings_dir, lambda: {"step": 7, "trained": True, "micro_batch_size": 4}, lambda _: None)
    return ending


def test_the_first_ending_of_a_process_is_kept(logs):
    OwnEnding().fail(KeyError("first"))
    OwnEnding().fail(ConnectionError("second"))
    (ending,) = read_endings(logs / "endings")
    assert ending.time > 1
    expected = Ending(Kind.ERROR, "KeyError: 'first'", exception="KeyError", rank=3, node="h7")
    assert replace(ending, time=expected.time, file=expected.file) == expected


def test_an_ending_that_the_run_folder_does_not_take_is_not_the_jobs_either_and_the_next_one_is(logs, attempt):
    own = begun(attempt)
    # As root may write anywhere: a file in the place of the folder.
    attempt.endings_dir.rmdir()
    attempt.endings_dir.touch()
    with pytest.raises(NotADirectoryError):
        own.write(Kind.FINISHED, "after step 7")
    attempt.endings_dir.unlink()
    attempt.endings_dir.mkdir()
    own.fail(OSError(28, "full"))
    for folder in (logs / "endings", attempt.endings_dir):
        assert [ending.kind for ending in read_endings(folder)] == [Kind.FILES]


def test_a_pipe_among_the_attempts_does_not_block(tmp_path, attempt):
    os.mkfifo(attempt.folder / "0002.json")
    assert [each["attempt"] for each in RunFolder(tmp_path).attempts()] == [1]


def test_an_ending_is_read_as_it_was_written(logs, attempt):
    begun(attempt).write(Kind.STOPPED, "by x", reason=StopReason.STOP_FILE)
    expected = Ending(Kind.STOPPED, "by x", StopReason.STOP_FILE, None, False, 3, "h7", 0.0, 7, True, 4)
    for folder in (logs / "endings", attempt.endings_dir):
        (ending,) = read_endings(folder)
        assert ending.file == str(folder / "rank_3.json")
        assert replace(ending, time=0.0, file="") == expected


def test_a_message_that_is_no_text_is_written_as_far_as_possible(logs):
    OwnEnding().fail(KeyError(os.fsdecode(b"/data/\xff")))
    assert "/data/" in read_endings(logs / "endings")[0].message


def test_nothing_else_is_raised_where_nothing_can_be_written(logs, attempt):
    logs.touch()
    begun(attempt).fail(KeyError("x"))
    assert read_endings(attempt.endings_dir)[0].exception == "KeyError"
    attempt.endings_dir.rename(attempt.folder / "moved")
    begun(attempt).fail(KeyError("no folder, no file, and no other error"))
    with pytest.raises(OSError, match="No such file"):
        begun(attempt).write(Kind.FINISHED, "")
    assert not attempt.endings_dir.exists()


def test_the_ending_of_a_run_is_that_of_its_latest_attempt(tmp_path, attempt):
    run = RunFolder(tmp_path)
    assert run.ending() is None
    begun(attempt).write(Kind.FINISHED, "")
    assert run.ending().kind == Kind.FINISHED
    later = claim(tmp_path / "attempts", {})
    assert run.ending() is None
    # One that has been overtaken disturbs nobody.
    begun(attempt).fail(KeyError("x"))
    assert run.ending() is None
    begun(later).fail(KeyError("x"))
    assert run.ending().kind == Kind.ERROR


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("[pair.cc:81] Read error [127.0.0.1]:4: Connection reset by peer"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed."), False),
        # A download of the task's.
        (ConnectionResetError(104, "Connection reset by peer"), False),
    ],
)
def test_consequences_are_told_by_what_collectives_say(error, expected, logs):
    OwnEnding().fail(error)
    assert read_endings(logs / "endings")[0].is_consequence is expected


def test_a_train_script_that_cannot_be_imported_leaves_evidence(tmp_path):
    (tmp_path / "config.py").touch()
    script = "from largebatch.task_folders import load_package\n__package__ = load_package(__file__)\nimport missing\n"
    (tmp_path / "train.py").write_text(script)
    command = ["env", f"LARGEBATCH_LOGS={tmp_path}", sys.executable, tmp_path / "train.py"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "ModuleNotFoundError" in result.stderr
    assert json.loads((tmp_path / "endings/rank_0.json").read_text())["kind"] == "import"
