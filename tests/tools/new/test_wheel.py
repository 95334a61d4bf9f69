"""An installed wheel, without the checkout: `largebatch new` makes a project that is checked and trained there."""

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
from test_launched import noise_in

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
    "slurm/steps.sh",
    "slurm/site.example.sh",
    "slurm/sites/*.sh",
    "ds_configs/*",
)


def run(*command, cwd, **environment):
    """What a command prints, in an environment that does not lead to the checkout."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STRATEGY", "RUN_DIR")}
    result = subprocess.run(
        command, cwd=cwd, env=outside | environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a source archive of a copy of the sources, because builds leave files there."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    pack = ["tar", "--create", "--exclude=__pycache__", "--exclude=*.egg-info", *SOURCES]
    packed = subprocess.run(pack, cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract"], cwd=sources, input=packed, check=True)
    build = "import setuptools.build_meta as build, sys; build.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=sources)
    (archive,) = folder.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, archive, cwd=folder)
    return folder / f"largebatch-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The commands of a new environment, which has this one's packages, but largebatch from the wheel."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    # A folder that a .pth file adds is searched last, and its own .pth files, such as the checkout's, are not read.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    commands = folder / "bin"
    accelerate = commands / "accelerate"
    accelerate.write_text(f'#!/bin/sh\nexec "{commands}/python" -m accelerate.commands.accelerate_cli "$@"\n')
    accelerate.chmod(0o755)
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", commands / "python", "install", *options, wheel, cwd=folder)
    return commands


def test_the_wheel_has_all_that_a_recipe_runs_with(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    shipped = [path.relative_to(ROOT) for pattern in SHIPPED for path in ROOT.glob(pattern)]
    assert len(shipped) > 2 * len(RECIPES)
    for path in shipped:
        assert inside[f"largebatch/shipped/{path}"] == (ROOT / path).read_bytes()
    assert "largebatch/py.typed" in inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith("tests")]


def test_a_project_of_an_installed_wheel(installed, tmp_path):
    run(installed / "largebatch", "new", "job", "--recipe=gpt_pydoc", cwd=tmp_path)
    project = tmp_path / "job"
    for path in project.rglob("*"):
        assert path.is_dir() or str(ROOT) not in path.read_text()
    where = run(installed / "python", "-c", "import largebatch; print(largebatch.__file__)", cwd=project)
    assert Path(where).is_relative_to(installed.parent)
    run(installed / "largebatch", "lint", cwd=project)
    (launch,) = re.findall(r"^\$ accelerate (launch .*)$", (project / "README.md").read_text(), re.MULTILINE)
    words = ["--train.stop_after_steps=2", "--evaluation.max_samples=8"]
    output = run(installed / "accelerate", *launch.split(), *words, cwd=project, CUDA_VISIBLE_DEVICES="")
    assert "Strategy      ddp on " in output
    assert output.count("\nfinished 2 steps") == 1
    assert noise_in(output) == []
    assert (project / "runs/gpt_pydoc/summary.json").is_file()


def test_citation_and_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
