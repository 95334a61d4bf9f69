"""What `largebatch submit` does not submit."""

import shutil
from pathlib import Path

import pytest

from submitting import RECIPE, SMOKE, submit


@pytest.mark.usefixtures("sbatch")
def test_a_wrong_optimizer_is_not_submitted(monkeypatch, capsys):
    monkeypatch.setattr("torch.optim.AdamW.step", lambda _: None)
    assert submit("gpt_pydoc", "--nodes", "2") == 2
    assert "the optimizer keeps no state 'exp_avg' for a parameter of shape" in capsys.readouterr().err
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--nodes=3"], "no-plan"),
        (["--nodes=2", "--strategy=zero9"], "strategy"),
        (["--nodes=2", "--seed=-1"], "recipe"),
        (["--nodes=2", "--batch.global_batch_size", "40", "--batch.micro_batch_size", "4"], "no-plan"),
    ],
)
def test_what_speaks_against_it_is_not_submitted(words, rule, capsys):
    assert submit("gpt_pydoc", *words) == 1
    finding, end = capsys.readouterr().out.splitlines()[-2:]
    assert finding.endswith(f"[{rule}]")
    assert end == "not submitted"
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.json"], "none.json: no such file"),
        (["elsewhere/mine.json"], "there is no slurm/mine.sbatch that runs elsewhere/mine.json; copy another"),
        (["lone.json"], "1 problem in lone.json:\n  - there is no config.py, which defines a recipe's fields; move"),
        (["elsewhere/gpt_pydoc.json"], f"there is no {SMOKE} that runs elsewhere/gpt_pydoc.json; copy another"),
        (["gpt_pydoc", "word"], "word: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "--time", "5"], "5: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "-t5"], "-t5: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "--optimzer.eps=1"], "--optimzer.eps=1: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "--export=NONE"], "--export=NONE: all of the environment is passed on"),
        (["gpt_pydoc", "--nodes=x"], "--nodes=x: the job's nodes or processes per node cannot be read"),
        (["gpt_pydoc", "--gpus=8"], "--nodes=2 --gpus=8: the job's nodes or processes per node cannot be read"),
    ],
)
def test_refused(words, message, capsys):
    shutil.copytree(Path(RECIPE).parent, "elsewhere")
    shutil.copy(RECIPE, "elsewhere/mine.json")
    Path("lone.json").write_bytes(Path(RECIPE).read_bytes())
    assert submit("--nodes=2", *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
def test_an_environment_that_is_not_there(monkeypatch, capsys):
    """Job and nodes would find it only when they start."""
    Path(".venv/bin/activate").unlink()
    error = "error: LARGEBATCH_ENV=.venv/bin/activate: there is no such file"
    assert submit("gpt_pydoc", "--nodes", "2") == 1
    assert error in capsys.readouterr().out
    assert not Path("called.json").exists()
    # A dry run shows the rest as well.
    assert submit("gpt_pydoc", "--nodes", "2", "--dry-run") == 1
    found = capsys.readouterr().out
    assert error in found
    assert "data.num_train_samples" in found
    monkeypatch.setenv("LARGEBATCH_CONTAINER", "apptainer:docker://image")
    assert submit("gpt_pydoc", "--nodes", "2") == 0
    Path("mine").touch()
    monkeypatch.delenv("LARGEBATCH_CONTAINER")
    monkeypatch.setenv("LARGEBATCH_ENV", "mine")
    assert submit("gpt_pydoc", "--nodes", "2") == 0
    assert "LARGEBATCH_ENV=mine LARGEBATCH_SNAPSHOT=" in capsys.readouterr().out


@pytest.mark.usefixtures("sbatch")
def test_without_sbatch(monkeypatch, capsys):
    only_bash = Path("only_bash")
    only_bash.mkdir()
    (only_bash / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(only_bash.resolve()))
    assert submit("gpt_pydoc", "--nodes=2") == 2
    assert "error: sbatch cannot be run (No such file or directory); submit on" in capsys.readouterr().err
    assert submit("gpt_pydoc", "--nodes=2", "--dry-run") == 0
    assert "not checked: the options of sbatch, which is not installed here" in capsys.readouterr().out
