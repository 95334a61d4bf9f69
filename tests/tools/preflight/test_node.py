"""What a node finds of itself; what it finds of others is tried on real hosts, in tests/cluster."""

import json
import os
import shutil
import socket

import pytest

import tasks
from jobs import run_job
from largebatch.config import load_config
from largebatch.tools.command_line import main
from largebatch.tools.preflight.node import Job, _connects, _listen, check_node, checkpoint_bytes
from paths import PYDOC, RECIPES, ROOT

DDP = ROOT / "recipes/accelerate_configs/ddp.yaml"


def job(folder, **changes):
    values = {"node": "n1", "rank": 0, "num_nodes": 1, "folder": folder, "token": "42", "host": "n1", "port": 1}
    return Job(**(values | {"gpus": 0, "world_size": 2, "deadline": 0.0} | changes))


def test_a_good_node(tmp_path):
    (tmp_path / "token").write_text("42\n")
    report = check_node(job(tmp_path), PYDOC, DDP, ())
    assert (report.problems, report.unreachable, report.refusal) == ([], [], "")
    assert report.versions["torch"]
    assert "pytest" not in report.versions
    assert "GB are free in the run folder" in report.disk_note
    assert report.disk_problem == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_node_is_reached_over_both_versions_of_ip(address):
    if not socket.has_dualstack_ipv6():
        address = "127.0.0.1"
    with _listen(0) as server:
        port = server.getsockname()[1]
        assert _connects(address, port)
    assert not _connects(address, port)


def test_two_checkpoints_must_fit(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("42\n")
    needed = 2 * checkpoint_bytes(PYDOC, load_config(PYDOC))
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(free, 0, free))
        report = check_node(job(tmp_path), PYDOC, DDP, ())
        assert (report.disk_problem == "", "free some space" in report.disk_problem) == (fits, not fits)


@pytest.mark.parametrize("text", [None, "41"])
def test_another_folder(text, tmp_path):
    if text:
        (tmp_path / "token").write_text(text)
    report = check_node(job(tmp_path), PYDOC, DDP, ())
    assert "is not the folder that the batch script wrote to" in report.problems[0]


def test_the_recipe_is_refused(tmp_path):
    (tmp_path / "token").write_text("42")
    report = check_node(job(tmp_path, world_size=3), PYDOC, DDP, ("--seed", "1"))
    assert "global_batch_size 32 is not a multiple" in report.refusal


def test_missing_gpus(tmp_path):
    (tmp_path / "token").write_text("42")
    assert (
        check_node(job(tmp_path, gpus=99), PYDOC, DDP, ())
        .problems[0]
        .endswith("GPUs are visible, but the job was given 99")
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('no model here')\n", "has no function build_model(config)"),
        # Which would otherwise end the node's report.
        ("import sys\nsys.exit()\n", "model.py:2: SystemExit; move what only a run does below"),
    ],
)
def test_a_script_without_a_model(script, reason, tmp_path, capsys):
    recipe = tasks.copy("causal_lm", tmp_path) / PYDOC.name
    recipe.with_name("model.py").write_text(script)
    (tmp_path / "token").write_text("42")
    report = check_node(job(tmp_path), recipe, DDP, ())
    assert "build_model(config) of model.py cannot be used: ConfigError" in report.disk_note
    assert reason in report.disk_note
    # What nodes print is read as reports.
    assert "no model here" not in capsys.readouterr().out


def test_code_and_recipe_are_compared(tmp_path):
    (tmp_path / "token").write_text("42")
    other = tmp_path / "other.yaml"
    other.write_text("# other\n")
    mine, theirs = (check_node(job(tmp_path), PYDOC, file, ()).versions for file in (DDP, other))
    assert mine[f"{DDP} (checksum)"] != theirs[f"{other} (checksum)"]
    for name in ("gpt_pydoc.json", "config.py", "data.py", "model.py", "train.py"):
        assert f"{PYDOC.with_name(name)} (checksum)" in mine


def size_of_a_checkpoint(run_dir):
    from largebatch.tools.verify.training import train

    words = ("--train.stop_after_steps=1", "--logging.trackers=[]", "--evaluation.every=null")
    train(PYDOC, *words, run_dir=run_dir)


@pytest.mark.slow
def test_size_of_a_checkpoint(tmp_path):
    """Against one that a run has written, whose files also have headers."""
    run_job(size_of_a_checkpoint, tmp_path / "run", strategy="ddp", world_size=1)
    files = (tmp_path / "run/checkpoints").rglob("*.safetensors")
    written = sum(file.stat().st_size for file in files)
    predicted = checkpoint_bytes(PYDOC, load_config(PYDOC))
    assert predicted <= written <= predicted + 50_000


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_says_how_large_its_model_is(recipe):
    config = load_config(recipe)
    if getattr(config.model, "path", None):
        # On the hub; the small model of its rehearsals, which has the same code.
        config = load_config(recipe, [f"--model={json.dumps({'architecture': 'auto', **config.debug_model})}"])
    assert checkpoint_bytes(recipe, config) > 0


def test_outside_of_slurm(monkeypatch, capsys, tmp_path):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    words = ["--accelerate-config", str(DDP), "--folder", str(tmp_path), "--token", "1", "--rendezvous", "a:1"]
    assert main(["preflight", str(PYDOC), *words, "--gpus", "0", "--world-size", "2"]) == 2
    assert "SLURMD_NODENAME is not set: run it with srun" in capsys.readouterr().err
