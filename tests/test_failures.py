"""The kinds of failures, and the evidence of those that end a start before its run has begun."""

import json
import subprocess
import sys

import pytest
import torch

from largebatch.failures import building_the_model, kind_of, leave_evidence


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
    ],
)
def test_kinds(error, kind):
    assert kind_of(error) == kind


@pytest.mark.parametrize(("error", "kind"), [(KeyError("x"), "model"), (OSError("x"), "files")])
def test_an_error_while_the_model_is_built(error, kind):
    with pytest.raises(type(error)) as caught, building_the_model():
        raise error
    assert kind_of(caught.value) == kind


def test_the_first_exception_of_a_start_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path))
    leave_evidence(KeyError("first"))
    leave_evidence(ConnectionError("second"))
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure == {"message": "KeyError: 'first'", "kind": "error", "exception": "KeyError"}
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path / "none"))
    leave_evidence(KeyError("no folder, no evidence, and no other error"))


def test_a_train_script_that_cannot_be_imported_leaves_evidence(tmp_path):
    task, logs = tmp_path / "task", tmp_path / "logs"
    for folder in (task, logs):
        folder.mkdir()
    (task / "config.py").touch()
    script = (
        "from largebatch.task_folders import run_script\nrun_script(__file__, __spec__)\nimport my_missing_module\n"
    )
    (task / "train.py").write_text(script)
    command = ["env", f"LARGEBATCH_LOGS={logs}", sys.executable, task / "train.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in result.stderr
    assert json.loads((logs / "failure.json").read_text())["kind"] == "import"
