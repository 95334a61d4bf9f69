"""What a node finds of itself; what it finds of others is tried in test_phases.py, and in tests/cluster."""

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from largebatch.tools.preflight import node_checks
from largebatch.tools.preflight.node_checks import check_node
from largebatch.tools.preflight.reports import Severity
from paths import PYDOC
from preflight_nodes import DDP, a_node


def test_a_good_node(tmp_path):
    report = check_node(a_node(tmp_path))
    assert report.findings == {}
    assert report.versions["torch"]
    assert "pytest" not in report.versions
    assert report.versions["open files (ulimit -n)"]
    assert report.versions["locked memory (ulimit -l; -1: unlimited)"]
    assert list(tmp_path.iterdir()) == []


def test_code_and_recipe_are_compared(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("# other\n")
    mine, theirs = (check_node(a_node(tmp_path, accelerate_config=file)).versions for file in (DDP, other))
    assert mine[f"{DDP} (checksum)"] != theirs[f"{other} (checksum)"]
    for name in ("gpt_pydoc.json", "config.py", "data.py", "model.py", "train.py"):
        assert f"{PYDOC.with_name(name)} (checksum)" in mine


@pytest.mark.parametrize(
    ("module", "name", "ability"),
    [
        (fcntl, "flock", "locks (flock)"),
        (Path, "hardlink_to", "hard links"),
        (Path, "rename", "renaming a file over another"),
    ],
)
def test_what_the_file_system_lacks(module, name, ability, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(module, name, missing)
    [(said, severity)] = check_node(a_node(tmp_path)).findings.items()
    assert f"does not support {ability}: Function not implemented; set RUN_DIR to a POSIX file system" in said
    assert severity == Severity.REFUSED
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        check_node(a_node(tmp_path / "gone"))


# --- GPUs ---------------------------------------------------------------------------------------------------------


def test_missing_gpus_and_why(tmp_path, monkeypatch):
    def old_driver():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12\n")
    monkeypatch.setattr(node_checks, "DRIVERS", (tmp_path / "gone", tmp_path / "version"))
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    report = check_node(a_node(tmp_path, gpus=8))
    assert report.versions["the GPU driver"] == "550.54.15"
    assert report.findings == {
        "no GPU can be used, and the job was given 8: The NVIDIA driver on your system is too old (found version "
        "12040). (RuntimeError)": Severity.BAD_NODE
    }


def test_a_torch_without_gpus(tmp_path):
    # Its words depend on how torch was built.
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        torch.cuda.init()
    [said] = check_node(a_node(tmp_path, gpus=1)).findings
    assert said.startswith("no GPU can be used, and the job was given 1: ")
    assert str(caught.value).split(".")[0] in said


@pytest.fixture
def two_gpus(monkeypatch):
    """This machine seems to have two GPUs, which nobody looks at closely."""
    ones = torch.ones
    gpus = {
        "init": lambda: None,
        "device_count": lambda: 2,
        "get_device_name": lambda index: ("H100", "A100")[index],
        "mem_get_info": lambda index: (79 * 2**30 - index * 40 * 2**30, 80 * 2**30),
        "nccl": SimpleNamespace(version=lambda: (2, 27, 3)),
    }
    for name, value in gpus.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "ones", lambda *size, **_: ones(*size))


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_compared_and_must_be_free(tmp_path):
    report = check_node(a_node(tmp_path, gpus=2))
    assert report.versions["the GPUs"] == "H100, A100"
    assert report.versions["NCCL"] == "(2, 27, 3)"
    assert report.findings == {"GPU 1 has 39.0 of 80.0 GiB free: another process is using it": Severity.BAD_NODE}
    assert list(check_node(a_node(tmp_path, gpus=3)).findings) == ["2 GPUs visible, and the job was given 3"]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_nobody_asked_for(tmp_path):
    [(said, severity)] = check_node(a_node(tmp_path)).findings.items()
    assert severity == Severity.REFUSED
    assert said.startswith("2 GPUs visible, and the job asked for none")
    assert "LARGEBATCH_PROCESSES_PER_NODE=2" in said


# --- the command --------------------------------------------------------------------------------------------------


def test_without_what_node_sh_sets(monkeypatch, refusal_of, tmp_path):
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path))
    words = ["--node-rank=0", "--num-nodes=2", "--address=a", "--port=1", "--seconds=1", "--gpus=0"]
    error = refusal_of("preflight", PYDOC, *words, "--accelerate-config", DDP)
    assert "LARGEBATCH_TOKEN or LARGEBATCH_LOGS is not set; run launch/node.sh" in error
