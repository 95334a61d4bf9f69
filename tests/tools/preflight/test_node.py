"""What a node finds of itself; what it finds of others is tried on real hosts, in tests/cluster."""

import os

import pytest

from largebatch.tools.command_line import main
from largebatch.tools.preflight.node import Job, check_node
from paths import PYDOC, ROOT

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
        .endswith("GPUs are visible, the job was given 99")
    )


def test_code_and_recipe_are_compared(tmp_path):
    (tmp_path / "token").write_text("42")
    other = tmp_path / "other.yaml"
    other.write_text("# other\n")
    mine, theirs = (check_node(job(tmp_path), PYDOC, file, ()).versions for file in (DDP, other))
    assert mine[f"{DDP} (checksum)"] != theirs[f"{other} (checksum)"]
    for name in ("gpt_pydoc.json", "config.py", "data.py", "model.py", "train.py"):
        assert f"{PYDOC.with_name(name)} (checksum)" in mine


def test_outside_of_slurm(monkeypatch, capsys, tmp_path):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    words = ["--accelerate-config", str(DDP), "--folder", str(tmp_path), "--token", "1", "--rendezvous", "a:1"]
    assert main(["preflight", str(PYDOC), *words, "--gpus", "0", "--world-size", "2"]) == 2
    assert "SLURMD_NODENAME is not set: run it by srun" in capsys.readouterr().err
