"""What `largebatch submit` does not submit."""

import shutil
from pathlib import Path

import pytest

from submitting import RECIPE, SMOKE

pytestmark = pytest.mark.usefixtures("sbatch")


@pytest.fixture
def refused(run_command):
    """Give what is printed instead of a submission."""

    def refused(*words, code=2):
        found, *printed = run_command("submit", *words)
        assert found == code
        assert not Path("called.json").exists()
        return "".join(printed)

    return refused


def test_a_wrong_optimizer_is_not_submitted(monkeypatch, refused):
    monkeypatch.setattr("torch.optim.AdamW.step", lambda _: None)
    told = refused("gpt_pydoc", "--nodes=2")
    assert "the optimizer keeps states of these shapes for a parameter of shape" in told


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--nodes=3", "no-plan"),
        ("--nodes=2 --strategy=zero9", "strategy"),
        ("--nodes=2 --seed=-1", "recipe"),
        ("--nodes=2 --batch.global_batch_size 40 --batch.micro_batch_size 4", "no-plan"),
    ],
)
def test_what_speaks_against_it_is_not_submitted(words, rule, refused):
    assert refused("gpt_pydoc", *words.split(), code=1).endswith(f"[{rule}]\nnot submitted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.json", "none.json: no such file"),
        ("elsewhere/mine.json", "there is no slurm/mine.sbatch that runs elsewhere/mine.json; copy another"),
        ("elsewhere/gpt_pydoc.json", f"there is no {SMOKE} that runs elsewhere/gpt_pydoc.json; copy another"),
        ("gpt_pydoc word", "word: neither a field of the recipe nor an option of sbatch"),
        ("gpt_pydoc --time 5", "5: neither a field of the recipe nor an option of sbatch"),
        ("gpt_pydoc --optimzer.eps=1", "--optimzer.eps=1: neither a field of the recipe nor an option of sbatch"),
        ("gpt_pydoc --export=NONE", "--export=NONE: all of the environment is passed on"),
        ("gpt_pydoc --nodes=x", "--nodes=x: the job's nodes or processes per node cannot be read"),
        ("gpt_pydoc --gpus=8", "--nodes=2 --gpus=8: the job's nodes or processes per node cannot be read"),
    ],
)
def test_refused(words, message, refused):
    shutil.copytree(Path(RECIPE).parent, "elsewhere")
    shutil.copy(RECIPE, "elsewhere/mine.json")
    assert refused("--nodes=2", *words.split()).startswith(f"error: {message}")


def test_an_environment_that_is_not_there(monkeypatch, refused, run_command, output_of):
    """Job and nodes would find it only when they start."""
    Path(".venv/bin/activate").unlink()
    words = ["gpt_pydoc", "--nodes=2"]
    said = "error: LARGEBATCH_ENV=.venv/bin/activate: there is no such file"
    assert said in refused(*words)
    # A dry run shows the rest as well.
    code, output, error = run_command("submit", *words, "--dry-run")
    assert code == 2
    assert said in error
    assert "data.num_train_samples" in output
    monkeypatch.setenv("LARGEBATCH_CONTAINER", "apptainer:docker://image")
    output_of("submit", *words)
    Path("mine").touch()
    monkeypatch.delenv("LARGEBATCH_CONTAINER")
    monkeypatch.setenv("LARGEBATCH_ENV", "mine")
    assert "LARGEBATCH_ENV=mine LARGEBATCH_SNAPSHOT=" in output_of("submit", *words)


def test_without_sbatch(monkeypatch, refused, output_of):
    only_bash = Path("only_bash")
    only_bash.mkdir()
    (only_bash / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(only_bash.resolve()))
    words = ["gpt_pydoc", "--nodes=2"]
    assert "error: sbatch cannot be run (No such file or directory); submit on" in refused(*words)
    dry = output_of("submit", *words, "--dry-run")
    assert "not checked: the options of sbatch, because sbatch is not installed here" in dry
