"""How a recipe leaves, and whom it tells why."""

import json
import time

import pytest

from largebatch.config import RecipeConfig
from largebatch.errors import RunStopped, TrainingFailed, UserError
from largebatch.run import command_line, parse_command_line, user_errors
from largebatch.run.record import record as record_module
from largebatch.run.record.folder import RunFolder
from largebatch.run.record.record import Record
from largebatch.run.resume import Start
from largebatch.storage.attempts import claim


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Where the batch script and torch's launcher look."""
    refusal, launcher = tmp_path / "refusal", tmp_path / "error.json"
    monkeypatch.setenv("LARGEBATCH_REFUSAL", str(refusal))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(launcher))
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("LARGEBATCH_NODE", "h2")
    monkeypatch.setenv("RANK", "3")
    return refusal, launcher


def test_words_that_cannot_be_parsed_are_refused_like_a_recipe(files):
    with pytest.raises(SystemExit, match="2"), user_errors():
        parse_command_line(RecipeConfig, ["--config=x.json", "--resume"])
    assert files[0].read_text() == "argument --resume: expected one argument"


@pytest.mark.parametrize(
    ("error", "kind", "resume"),
    [
        (UserError("seed: no"), "configuration", False),
        (TrainingFailed("nan"), "training", False),
        (KeyError("x"), "error", True),
        (ModuleNotFoundError("x"), "import", False),
        (ConnectionResetError("x"), "communication", True),
    ],
)
def test_the_status_has_the_facts_by_which_a_job_is_started_again(error, kind, resume, tmp_path):
    folder = RunFolder(tmp_path)
    record = Record(folder, claim(folder.attempts_dir, {}), Start(), 8, True, print)
    record.step = 3
    with pytest.raises((SystemExit, type(error))), user_errors():
        raise error
    record_module._of_this_process.clear()
    status = json.loads(folder.status_file.read_text())
    facts = {"outcome": "failed", "kind": kind, "exception": type(error).__name__, "resume": resume}
    assert status.items() >= (facts | {"trained": True, "micro_batch_size": 8, "step": 3}).items()


LAUNCHERS = [{"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}, {"ACCELERATE_MIXED_PRECISION": "no"}]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def leave_with(error):
    with pytest.raises(SystemExit) as left, user_errors():
        raise error
    return left.value.code


def test_a_refusal_is_told_to_the_batch_script_and_to_the_launcher(files, capsys):
    refusal, launcher = files
    assert leave_with(UserError("seed: no")) == 2
    assert capsys.readouterr().err == "error: seed: no\n"
    assert refusal.read_text() == "seed: no"
    assert json.loads(launcher.read_text())["message"]["message"] == "error: seed: no"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_traceback_of_a_launcher_is_introduced(launcher, monkeypatch, capsys):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    assert leave_with(UserError("seed: no")) == 2
    message, note = capsys.readouterr().err.splitlines()
    assert message == "error: seed: no"
    assert note.startswith("note: the reason is the message above; what follows is the launcher's report")


def test_only_the_first_process_introduces_it(monkeypatch, capsys):
    for name, value in (LAUNCHERS[0] | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command_line, "SECONDS_FOR_THE_REPORT", 0)
    assert leave_with(UserError("seed: no")) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("launcher", "count"), [({}, 0), *((launcher, 1) for launcher in LAUNCHERS)])
def test_a_crash_says_which_traceback_to_read(launcher, count, files, monkeypatch):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as caught, user_errors():
        raise RuntimeError("gone")
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == count
    assert all("the traceback above of the process that failed first" in note for note in notes)
    # At the end of the launcher's report.
    reported = json.loads(files[1].read_text())["message"]["extraInfo"]["py_callstack"]
    assert reported.startswith("Traceback (most recent call last):\n")
    assert reported.endswith("RuntimeError: gone\n")


def test_a_failure_is_kept_in_the_logs(files):
    assert leave_with(UserError("seed: no")) == 2
    error = json.loads((files[0].parent / "logs/errors/rank_3.json").read_text())
    assert 0 <= time.time() - error.pop("time") < 600
    assert error == {
        "rank": 3,
        "node": "h2",
        "kind": "configuration",
        "exception": "UserError",
        "message": "seed: no",
        "consequence": False,
    }


@pytest.mark.parametrize("logs", [None, "a file"])
def test_logs_that_are_not_there_hide_no_message(logs, files, monkeypatch, capsys):
    monkeypatch.delenv("LARGEBATCH_LOGS")
    if logs:
        (files[0].parent / logs).touch()
        monkeypatch.setenv("LARGEBATCH_LOGS", str(files[0].parent / logs))
    assert leave_with(UserError("seed: no")) == 2
    assert "error: seed: no" in capsys.readouterr().err


def test_a_stop_is_no_refusal(files, capsys):
    refusal, launcher = files
    assert leave_with(RunStopped("by SIGTERM")) == 75
    assert capsys.readouterr().err == "stopped: by SIGTERM\n"
    assert not refusal.exists()
    assert launcher.exists()
    assert not (refusal.parent / "logs").exists()


def test_training_that_failed_is_no_refusal(files):
    assert leave_with(TrainingFailed("the loss is nan")) == 1
    assert not files[0].exists()
