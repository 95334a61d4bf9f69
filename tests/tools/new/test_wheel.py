"""An installed wheel, without the checkout: `largebatch new` there makes bundles in which every command works."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

from largebatch import __version__
from paths import RECIPES, ROOT

pytestmark = pytest.mark.slow

SOURCES = (
    "src",
    "recipes",
    "ds_configs",
    "launch",
    "slurm",
    "pyproject.toml",
    "setup.py",
    "requirements.txt",
    "README.md",
    "LICENSE",
)
SHIPPED = (
    "recipes/*/*.json",
    "recipes/*/*.yaml",
    "recipes/*/*.py",
    "launch/*",
    "slurm/*.sbatch",
    "slurm/launch.sh",
    "slurm/site.example.sh",
    "ds_configs/*",
)

# In the manner of Slurm's commands, as far as launch.sh uses them, on a cluster that is this machine.
SLURM = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo localhost",
    "squeue": "echo RUNNING",
}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_JOB_END_TIME": "",
    # Of its steps.
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURMD_NODENAME": "localhost",
}


def run(*command, cwd: Path, code: int = 0, **environment: str) -> str:
    """What a command prints, in an environment that does not lead to the checkout."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STRATEGY", "RUN_DIR")}
    result = subprocess.run(
        command, cwd=cwd, env=outside | environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def install(python: Path, *words, cwd: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *words, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, because builds leave files there."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    pack = ["tar", "--create", "--exclude=__pycache__", "--exclude=*.egg-info", *SOURCES]
    packed = subprocess.run(pack, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract"], cwd=sources, input=packed, check=True)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, sources, cwd=folder)
    return folder / f"largebatch-{__version__}-py3-none-any.whl"


def make_environment(folder: Path, wheel: Path) -> Path:
    """The commands of a new environment, which has this one's packages, but largebatch from the wheel."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    # A folder that a .pth file adds is searched last, and its own .pth files, such as the checkout's, are not read.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    commands = folder / "bin"
    for name, module in (("accelerate", "accelerate.commands.accelerate_cli"), ("pytest", "pytest")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{commands}/python" -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    install(commands / "python", wheel, cwd=folder)
    return commands


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("installed") / "environment", wheel)


@pytest.fixture
def bundle(installed, tmp_path) -> Path:
    """The smoke recipe, made by the installed command."""
    run(installed / "largebatch", "new", "job", "--recipe=gpt_pydoc", cwd=tmp_path)
    return tmp_path / "job"


def test_the_wheel_has_all_that_a_recipe_runs_with(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    shipped = [path.relative_to(ROOT) for pattern in SHIPPED for path in ROOT.glob(pattern)]
    assert len(shipped) > 2 * len(RECIPES)
    for path in shipped:
        assert inside[f"largebatch/shipped/{path}"] == (ROOT / path).read_bytes()
    assert "largebatch/py.typed" in inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith("tests")]


def test_the_source_archive_makes_the_same_wheel(wheel, tmp_path):
    build = "import setuptools.build_meta as build, sys; build.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=wheel.parent / "sources")
    (archive,) = tmp_path.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", tmp_path, archive, cwd=tmp_path)
    with zipfile.ZipFile(wheel) as expected, zipfile.ZipFile(tmp_path / wheel.name) as made:
        assert sorted(made.namelist()) == sorted(expected.namelist())


def test_installed(installed, tmp_path):
    assert run(installed / "largebatch", "--version", cwd=tmp_path) == f"largebatch {__version__}\n"
    where = run(installed / "python", "-c", "import largebatch; print(largebatch.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(installed.parent)
    made = run(installed / "largebatch", "new", "job", "--recipe=llama_1b", cwd=tmp_path)
    assert f"LARGEBATCH_ENV={installed / 'activate'} sbatch slurm/llama_1b.sbatch" in made
    for path in (tmp_path / "job").rglob("*"):
        assert path.is_dir() or str(ROOT) not in path.read_text()
    assert run(installed / "largebatch", "lint", cwd=tmp_path / "job") == "13 files, nothing found\n"


def test_the_test_of_a_bundle(bundle, installed):
    """Trains by `accelerate launch`, and finds a mistake in train.py and one in the recipe."""
    assert "2 passed" in run(installed / "pytest", "-q", cwd=bundle)
    train = bundle / "recipes/causal_lm/train.py"
    train.write_text(train.read_text().replace("step.backward(", "step.backwards("))
    printed = run(installed / "pytest", "-q", cwd=bundle, code=1)
    assert "1 failed, 1 passed" in printed
    assert "'Step' object has no attribute 'backwards'" in printed
    recipe = bundle / "recipes/causal_lm/gpt_pydoc.json"
    recipe.write_text(recipe.read_text().replace('"global_batch_size": 32', '"global_batch_size": 33'))
    assert "1 failed, 1 deselected" in run(installed / "pytest", "-q", "-k", "not trains", cwd=bundle, code=1)


def test_verify_as_the_readme_says_without_the_recipes_data(installed, tmp_path):
    run(installed / "largebatch", "new", "job", "--recipe=gpt2_124m", cwd=tmp_path)
    text = (tmp_path / "job/README.md").read_text()
    (command,) = re.findall(r"^\$ (largebatch verify (?:.*\\\n)*.*)$", text, re.MULTILINE)
    path = f"{installed}:{os.environ['PATH']}"
    printed = run("bash", "-c", f"{command} --strategies ddp", cwd=tmp_path / "job", PATH=path)
    assert "2 of 2 combinations agree" in printed
    assert (tmp_path / "job/runs/gpt2_124m.verify.json").is_file()


def test_the_job_of_a_bundle(bundle, installed, tmp_path):
    """The batch script from pre-flight to the end, in the environment that `largebatch new` printed."""
    commands = tmp_path / "slurm"
    commands.mkdir()
    for name, text in SLURM.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    environment = {
        **JOB,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "LARGEBATCH_ENV": str(installed / "activate"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = ["--train.stop_after_steps=2", "--evaluation.max_samples=8"]
    log = run("bash", "slurm/gpt_pydoc.sbatch", *words, cwd=bundle, **environment)
    assert log.rstrip().endswith("finished")
    assert "gpt_pydoc.json under ddp on 1 nodes x 2 processes" in log
    assert (bundle / "runs/gpt_pydoc/summary.json").is_file()


def test_a_bundle_with_the_package_in_it(wheel, tmp_path):
    installed = make_environment(tmp_path / "environment", wheel)
    run(installed / "largebatch", "new", "job", "--recipe=vit_digits", "--vendor", cwd=tmp_path)
    bundle = tmp_path / "job"
    assert not [*bundle.rglob("shipped"), *bundle.rglob("__pycache__")]
    # As long as the environment has another one, the bundle's test says so.
    words = ["-q", "--deselect", "tests/test_recipe.py::test_trains"]
    assert "run: pip install --no-deps --editable ." in run(installed / "pytest", *words, cwd=bundle, code=1)
    install(installed / "python", "--editable", bundle, cwd=bundle)
    assert "2 passed" in run(installed / "pytest", *words, cwd=bundle)
    where = run(installed / "python", "-c", "import largebatch; print(largebatch.__file__)", cwd=tmp_path)
    assert Path(where.strip()) == bundle / "src/largebatch/__init__.py"
    # Its own recipe can be copied on.
    run(installed / "largebatch", "new", "second", "--recipe=vit_digits", "--vendor", cwd=tmp_path)
    for path in bundle.rglob("*"):
        copy = tmp_path / "second" / path.relative_to(bundle)
        generated = {"__pycache__", ".pytest_cache", "largebatch.egg-info"} & set(path.parts)
        assert generated or path.is_dir() or copy.read_bytes() == path.read_bytes(), path


def test_citation_and_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
