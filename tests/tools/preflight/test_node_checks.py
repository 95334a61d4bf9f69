"""What a node finds of itself; what it finds of others is tried in test_phases.py, and in tests/cluster."""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tasks
from jobs import run_job, train
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.tools.preflight import node_checks
from largebatch.tools.preflight.node_checks import check_node, check_room_for_checkpoints, checkpoint_bytes
from largebatch.tools.preflight.reports import Node
from largebatch.tools.preflight.verdict import Findings
from paths import PYDOC
from preflight_nodes import DDP


def one_node(folder, **changes):
    values = {"name": "n1", "rank": 0, "num_nodes": 1, "folder": folder, "token": "42", "host": "n1", "port": 1}
    return Node(**(values | {"gpus": 0, "seconds": 1.0} | changes))


def room(folder, recipe=PYDOC):
    findings = Findings("n1")
    check_room_for_checkpoints(findings, folder, recipe, ())
    return findings


def test_a_good_node(tmp_path):
    findings = check_node(one_node(tmp_path), PYDOC, DDP, ())
    assert (findings.problems, findings.refusals) == ([], [])
    assert findings.versions["torch"]
    assert "pytest" not in findings.versions
    assert findings.versions["open files (ulimit -n)"]
    assert findings.versions["locked memory (ulimit -l)"]


def test_two_checkpoints_must_fit(tmp_path, monkeypatch):
    needed = 2 * checkpoint_bytes(load_config(PYDOC))
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(free, 0, free))
        findings = room(tmp_path)
        assert ("are free in the run folder" in str(findings.notes), findings.refusals == []) == (fits, fits)
        assert ("free some space" in str(findings.refusals)) != fits


# --- GPUs ---------------------------------------------------------------------------------------------------------


def test_missing_gpus_and_why(tmp_path, monkeypatch):
    def old_driver():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 12\n")
    monkeypatch.setattr(node_checks, "DRIVERS", (tmp_path / "gone", tmp_path / "version"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    findings = check_node(one_node(tmp_path, gpus=8), PYDOC, DDP, ())
    assert findings.versions["the GPU driver"] == "550.54.15"
    assert findings.versions["the CUDA that torch was built for"] == "13.0"
    assert findings.problems == [
        "0 GPUs are visible, but the job was given 8: The NVIDIA driver on your system is too old (found version "
        "12040). (RuntimeError)"
    ]


def test_a_torch_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    findings = check_node(one_node(tmp_path, gpus=1), PYDOC, DDP, ())
    assert "Torch not compiled with CUDA enabled" in findings.problems[0]


@pytest.fixture
def two_gpus(monkeypatch):
    """This machine seems to have two GPUs, which nobody looks at closely."""
    ones = torch.ones
    gpus = {
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
    findings = check_node(one_node(tmp_path, gpus=2), PYDOC, DDP, ())
    assert findings.versions["the GPUs"] == "1 x H100, 1 x A100"
    assert findings.versions["NCCL"] == "2.27.3"
    assert findings.problems == ["GPU 1 has 39.0 of 80.0 GiB free: another process is using it"]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_nobody_asked_for(tmp_path):
    (refusal,) = check_node(one_node(tmp_path), PYDOC, DDP, ()).refusals
    assert refusal.startswith("there are 2 GPUs, and the job asked for none")
    assert "LARGEBATCH_PROCESSES_PER_NODE=2" in refusal


# --- the recipe ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        # Which would otherwise end the pre-flight.
        ("import sys\nsys.exit()\n", "model.py:2: SystemExit; move what only a run does below"),
        ("def build_model(config):\n    return 1 / 0\n", "division by zero"),
    ],
)
def test_a_script_without_a_model(script, reason, tmp_path):
    recipe = tasks.copy("causal_lm", tmp_path) / PYDOC.name
    recipe.with_name("model.py").write_text(script)
    (refusal,) = room(tmp_path, recipe).refusals
    assert refusal.startswith("the recipe's model cannot be built: ")
    assert reason in refusal


def test_a_hub_that_does_not_answer_is_no_reason_to_refuse(tmp_path):
    recipe = tasks.copy("causal_lm", tmp_path) / PYDOC.name
    script = "def build_model(config):\n    raise OSError('We could not connect to the hub')\n"
    recipe.with_name("model.py").write_text(script)
    findings = room(tmp_path, recipe)
    assert findings.refusals == []
    assert "We could not connect to the hub" in findings.notes[0]


def test_code_and_recipe_are_compared(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("# other\n")
    mine, theirs = (check_node(one_node(tmp_path), PYDOC, file, ()).versions for file in (DDP, other))
    assert mine[f"{DDP} (checksum)"] != theirs[f"{other} (checksum)"]
    for name in ("gpt_pydoc.json", "config.py", "data.py", "model.py", "train.py"):
        assert f"{PYDOC.with_name(name)} (checksum)" in mine


@pytest.mark.slow
def test_size_of_a_checkpoint(tmp_path):
    """Against one that a run has written, whose files also have headers."""
    words = ("--train.stop_after_steps=1", "--logging.trackers=[]", "--evaluation.every=null")
    run_job(partial(train, PYDOC, *words, run_dir=tmp_path / "run"), strategy="ddp", world_size=1)
    files = (tmp_path / "run/checkpoints").rglob("*.safetensors")
    written = sum(file.stat().st_size for file in files)
    predicted = checkpoint_bytes(load_config(PYDOC))
    assert predicted <= written <= predicted + 50_000


# --- the command --------------------------------------------------------------------------------------------------


def test_without_what_node_sh_sets(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LARGEBATCH_LOGS", str(tmp_path))
    words = ["--node-rank=0", "--num-nodes=2", "--address=a", "--port=1", "--seconds=1"]
    words += ["--gpus=0", f"--accelerate-config={DDP}"]
    assert main(["preflight", str(PYDOC), *words]) == 2
    assert "LARGEBATCH_TOKEN or LARGEBATCH_LOGS is not set; run launch/node.sh" in capsys.readouterr().err
