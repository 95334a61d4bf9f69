"""The kinds of failures, and the evidence of those that end a start before its run has begun."""

import json
import subprocess
import sys

import pytest
import torch

from largebatch.errors import ConfigError, TrainingFailed
from largebatch.system.failures import building_the_model, keep_exception, kind_of


def raised_from(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModuleNotFoundError("x"), "import"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (torch.distributed.DistBackendError("NCCL error"), "communication"),
        (torch.distributed.DistNetworkError("x"), "communication"),
        (ConnectionResetError("x"), "communication"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), "communication"),
        (RuntimeError("NCCL communicator was aborted on rank 1"), "communication"),
        (OSError(28, "No space left on device"), "files"),
        (raised_from(RuntimeError("x"), OSError(5, "Input/output error")), "files"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (KeyError("gloo"), "error"),
        (ConfigError("seed: missing"), "configuration"),
        (TrainingFailed("the loss is nan"), "training"),
    ],
)
def test_kinds(error, kind):
    assert kind_of(error) == kind


@pytest.mark.parametrize(("error", "kind"), [(KeyError("x"), "model"), (OSError("x"), "files")])
def test_an_error_while_the_model_is_built(error, kind):
    with pytest.raises(type(error)) as caught, building_the_model():
        raise error
    assert kind_of(caught.value) == kind


def test_the_first_exception_of_a_process_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LARGEBATCH_NODE", "h7")
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path))
    keep_exception(KeyError("first"))
    keep_exception(ConnectionError("second"))
    (file,) = (tmp_path / "errors").iterdir()
    assert file.name == "rank_3.json"
    error = json.loads(file.read_text())
    assert error.pop("time") > 1
    assert error == {
        "rank": 3,
        "node": "h7",
        "kind": "error",
        "exception": "KeyError",
        "message": "KeyError: 'first'",
        "consequence": False,
    }
    (tmp_path / "file").touch()
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path / "file"))
    keep_exception(KeyError("no folder, no file, and no other error"))


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
def test_consequences_are_told_by_what_collectives_say(error, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path))
    keep_exception(error)
    assert json.loads((tmp_path / "errors/rank_0.json").read_text())["consequence"] is expected


def test_a_train_script_that_cannot_be_imported_leaves_evidence(tmp_path):
    (tmp_path / "config.py").touch()
    script = "from largebatch.task_folders import load_package\n__package__ = load_package(__file__)\nimport missing\n"
    (tmp_path / "train.py").write_text(script)
    command = ["env", f"LARGEBATCH_LOGS={tmp_path}", sys.executable, tmp_path / "train.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in result.stderr
    assert json.loads((tmp_path / "errors/rank_0.json").read_text())["kind"] == "import"
