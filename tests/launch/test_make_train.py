"""`make train`: on how many processes it starts, and what it says before it is silent."""

import os
import subprocess
import sys

import pytest

from paths import ROOT
from played import write_commands


@pytest.fixture
def make_train(tmp_path, monkeypatch):
    """Run it where the installed programs are stand-ins but for `largebatch`; return what it prints."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed").touch()

    def run(gpus, **variables):
        largebatch = f'exec {sys.executable} -m largebatch "$@"'
        write_commands(tmp_path / ".venv/bin", {"largebatch": largebatch, "accelerate": "", "python": f"echo {gpus}"})
        job = subprocess.run(
            ["make", "train"], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
        )
        return job.stdout + job.stderr

    return run


@pytest.mark.parametrize(("gpus", "used"), [(3, 2), (8, 4)])
def test_it_takes_as_many_gpus_as_the_batch_allows(gpus, used, make_train):
    """`resnet_digits` has a batch of 64, in micro-batches of 16."""
    assert f"--num_processes {used} " in make_train(gpus)


def test_a_number_of_processes_that_is_given_is_taken_or_refused(make_train):
    assert "--num_processes 4 " in make_train(1, NUM_PROCESSES="4")
    refused = make_train(1, NUM_PROCESSES="8")
    assert "64 is not a multiple of" in refused
    assert "accelerate launch" not in refused


def test_a_recipe_that_is_wrong_on_any_number(make_train):
    assert "no such file" in make_train(8, CONFIG="recipes/none.json")


def test_long_silences_are_announced(make_train, tmp_path):
    (tmp_path / ".venv/installed").unlink()
    write_commands(tmp_path / ".venv/bin", {"pip": ""})
    said = make_train(1, PYTHON="true")
    before_pip, _, after = said.partition(".venv/bin/pip install")
    assert "at least 2 GB" in before_pip
    assert "10 to 60 seconds" in after.partition("accelerate launch")[0]
