"""How a recipe leaves, and whom it tells why."""

import json

import pytest
import torch

import tasks
from largebatch.errors import RunStopped, UserError
from largebatch.run import command_line, from_command_line
from largebatch.run.command_line import user_errors
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding, read_endings
from paths import PYDOC
from recording import begin


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Where torch's launcher looks."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Where `largebatch job-ended` looks."""
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path / "logs"))
    return tmp_path / "logs/endings"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=x.json", "--resume"], "argument --resume: expected one argument"),
        (["--seed=1"], "the following arguments are required: --config"),
        (["--config=none.json"], "no such file"),
        ([f"--config={PYDOC}"], "belongs to a different task than "),
    ],
)
def test_words_that_cannot_be_used_are_refused_like_a_recipe(words, message, logs):
    config = tasks.module("image_classification", "config").Config
    with pytest.raises(SystemExit, match="2"), from_command_line(config, words):
        pass
    (ending,) = read_endings(logs)
    assert ending.kind == "refused"
    assert message in ending.message


@pytest.mark.parametrize(
    ("error", "kind", "retry"),
    [
        (UserError("seed: no"), "refused", False),
        (KeyError("x"), "error", True),
        (ModuleNotFoundError("x"), "import", False),
    ],
)
def test_an_ending_has_the_facts_by_which_a_job_is_started_again(error, kind, retry, tmp_path):
    folder = RunFolder(tmp_path)
    own = OwnEnding()
    begin(tmp_path, own).step = 3
    with pytest.raises((SystemExit, type(error))), user_errors(own):
        raise error
    ending = folder.ending()
    assert (ending.kind, ending.retry, ending.exception) == (kind, retry, type(error).__name__)
    assert (ending.trained, ending.micro_batch_size, ending.step) == (True, 8, 3)
    assert folder.history()[-1].items() >= {"event": "failed", "kind": kind, "step": 3}.items()


LAUNCHERS = [{"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}, {"ACCELERATE_MIXED_PRECISION": "no"}]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def leave_with(error):
    with pytest.raises(SystemExit) as left, user_errors(OwnEnding()):
        raise error
    return left.value.code


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_the_traceback_of_a_launcher_is_introduced(variables, launcher, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = UserError("seed: \x1bno")
    error.__cause__ = KeyError("seed")
    assert leave_with(error) == 2
    message, note = capsys.readouterr().err.splitlines()
    assert message == "error: seed: \\x1bno"
    assert note.startswith("note: the reason is the message above; what follows is the launcher's report")
    # What the report ends with.
    reported = json.loads(launcher.read_text())["message"]["extraInfo"]["py_callstack"]
    assert reported == "largebatch.errors.UserError: seed: \\x1bno\n"


@pytest.mark.parametrize(("variables", "count"), [({}, 0), *((each, 1) for each in LAUNCHERS)])
def test_a_crash_says_which_traceback_to_read(variables, count, launcher, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as caught, user_errors(OwnEnding()):
        raise RuntimeError("gone")
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == count
    assert all("the traceback above of the process that failed first" in note for note in notes)
    # At the end of the launcher's report.
    reported = json.loads(launcher.read_text())["message"]["extraInfo"]["py_callstack"]
    assert reported.startswith("Traceback (most recent call last):\n")
    assert reported.endswith("RuntimeError: gone\n")


@pytest.mark.parametrize(
    ("joined", "everywhere", "said"),
    [(False, False, "error: seed: no\n"), (True, True, ""), (True, False, "[rank 2] error: seed: no\n")],
)
def test_an_error_of_all_is_told_once_by_each_machine_or_by_the_job(joined, everywhere, said, monkeypatch, capsys):
    """The first process of a second machine tells it, unless the first of all does."""
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    monkeypatch.setattr(command_line, "SECONDS_FOR_THE_REPORT", 0)
    assert leave_with(UserError("seed: no", everywhere=everywhere)) == 2
    assert capsys.readouterr().err == said


def test_logs_that_cannot_be_written_hide_no_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "a file").touch()
    for name, value in (LAUNCHERS[0] | {"LARGEBATCH_LOGS": str(tmp_path / "a file")}).items():
        monkeypatch.setenv(name, value)
    # torchrun's is in a full file system, or as here a folder.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path))
    assert leave_with(UserError("seed: no")) == 2
    assert "error: seed: no" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="gone"), user_errors(OwnEnding()):
        raise RuntimeError("gone")


def test_a_stop_is_no_failure(logs, capsys):
    """Who stops the run writes the ending, with the reason."""
    assert leave_with(RunStopped("by SIGTERM")) == 75
    assert capsys.readouterr().err == "stopped: by SIGTERM\n"
    assert not logs.exists()


@pytest.mark.parametrize(("variables", "code"), [({}, 75), *((each, 0) for each in LAUNCHERS)])
def test_a_launcher_reports_no_failure_after_the_stop_file(variables, code, launcher, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert leave_with(RunStopped("by the stop file", by_a_person=True)) == code
    assert capsys.readouterr().err == "stopped: by the stop file\n"
    assert not launcher.exists()
