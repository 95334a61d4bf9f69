"""How a recipe leaves, and whom it tells why."""

import json

import pytest

from largebatch.errors import RunStopped, TrainingFailed, UserError
from largebatch.run import user_errors


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Where the batch script and torch's launcher look."""
    refusal, launcher = tmp_path / "refusal", tmp_path / "error.json"
    monkeypatch.setenv("LARGEBATCH_REFUSAL", str(refusal))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(launcher))
    return refusal, launcher


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


def test_a_stop_is_no_refusal(files, capsys):
    refusal, launcher = files
    assert leave_with(RunStopped("by SIGTERM")) == 75
    assert capsys.readouterr().err == "stopped: by SIGTERM\n"
    assert not refusal.exists()
    assert launcher.exists()


def test_training_that_failed_is_no_refusal(files):
    assert leave_with(TrainingFailed("the loss is nan")) == 1
    assert not files[0].exists()


def test_a_crash_is_no_refusal(files):
    with pytest.raises(RuntimeError, match="gone"), user_errors():
        raise RuntimeError("gone")
    assert not files[0].exists()


def test_a_folder_that_is_gone_hides_no_message(files, monkeypatch, capsys):
    monkeypatch.setenv("LARGEBATCH_REFUSAL", str(files[0] / "gone" / "refusal"))
    assert leave_with(UserError("seed: no")) == 2
    assert capsys.readouterr().err == "error: seed: no\n"
