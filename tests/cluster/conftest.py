"""Jobs on a real Slurm cluster of three hosts on this machine; each test has a cluster of its own."""

import os
import re
import sys
from pathlib import Path

import pytest

import stand_in
from paths import MAPS, ROOT
from played import write_commands
from resuming import run_interrupted
from slurm_cluster import Cluster, why_not
from slurm_job import Job

NUM_HOSTS = 3


@pytest.fixture
def first_host():
    """The number of the first host."""
    return 1


@pytest.fixture
def cluster(tmp_path, first_host):
    reason = why_not()
    if reason:
        pytest.skip(f"no Slurm cluster can be started here: {reason}")
    cluster = Cluster(NUM_HOSTS, tmp_path / "cluster.log", first_host)
    yield cluster
    cluster.close()


@pytest.fixture
def play(tmp_path_factory):
    """Writes a file for LARGEBATCH_ENV: the environment of the tests, with bash scripts in place of some programs."""

    def write(**programs):
        folder = tmp_path_factory.mktemp("environment")
        write_commands(folder, programs)
        file = folder / "activate"
        file.write_text(f"source {sys.prefix}/bin/activate\nPATH={folder}:$PATH\n")
        return file

    return write


def script_of(recipe, folder):
    """A batch script in `folder` that is the shipped smoke job's but for its recipe."""
    script = folder / f"{recipe.stem}.sbatch"
    text = (ROOT / "slurm/gpt_pydoc.sbatch").read_text()
    script.write_text(re.sub("^RECIPE=.*$", f"RECIPE={os.path.relpath(recipe, ROOT)}", text, flags=re.MULTILINE))
    return script


@pytest.fixture
def submit(cluster, play, tmp_path):
    """Submits a recipe from the login node, by default without a pre-flight, and with a stand-in for the training."""

    def submit_script(*words, options, name="run", recipe=MAPS, programs=None, has_environment=True, **settings):
        if has_environment:
            programs = {"accelerate": stand_in.program()} | (programs or {})
            settings = {"LARGEBATCH_ENV": str(play(**programs))} | settings
        settings = {"LARGEBATCH_PREFLIGHT": "off", "RUN_DIR": str(tmp_path / name)} | settings
        log = tmp_path / f"{name}.log"
        command = ("sbatch", "--parsable", f"--output={log}", *options, str(script_of(recipe, tmp_path)), *words)
        number = cluster.command(*command, environment=settings, cwd=ROOT).strip()
        return Job(cluster, number, Path(settings["RUN_DIR"]), log)

    return submit_script


@pytest.fixture
def uninterrupted(tmp_path):
    """Trains the run that a job is compared with: one host, no Slurm, nothing happens to it."""

    def run(words, world_size, recipe=MAPS):
        run_dir = tmp_path / "uninterrupted/run"
        strategy = "single" if world_size == 1 else "ddp"
        assert run_interrupted(run_dir, words, strategy=strategy, world_size=world_size, recipe=recipe) is None
        return run_dir

    return run
