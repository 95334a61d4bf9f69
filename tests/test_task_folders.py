"""A task's folder is one package, wherever it is, and however its train.py is started."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.task_folders import import_from
from largebatch.tools.local_jobs.training import train
from paths import ROOT

PROGRAM = """
from largebatch.task_folders import load_package

__package__ = load_package(__file__)

import multiprocessing
import os
import sys
from types import SimpleNamespace

import config  # a library of this name, not the file beside this one

from largebatch.config import load_config
from largebatch.task_folders import import_from

from . import data
from .config import Config


def main(_config, options):
    recipe = options.recipe
    assert type(load_config(recipe)) is Config
    assert data is import_from(os.path.dirname(recipe), "data")
    with multiprocessing.get_context(os.environ["METHOD"]).Pool(1) as pool:
        print(pool.map(data.double, [data.Sample(3)])[0], config.NAME)


if __name__ == "__main__":
    main(None, SimpleNamespace(recipe=sys.argv[2]))
"""
DATA = """
from dataclasses import dataclass


@dataclass
class Sample:
    value: int


def double(sample):
    return Sample(2 * sample.value)
"""
OUTPUT = "Sample(value=6) library\n"


@pytest.fixture(name="folder")
def task_folder(tmp_path):
    """A task whose train.py needs no torch, in a folder whose name is not that of a module, and a library."""
    folder = tmp_path / "2nd task.v2"
    folder.mkdir()
    for name in ("config.py", "maps.json"):
        shutil.copy(ROOT / "tests/outside_task" / name, folder)
    (folder / "data.py").write_text(DATA)
    (folder / "train.py").write_text(PROGRAM)
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/config.py").write_text("NAME = 'library'\n")
    return folder


def test_a_folder_is_a_package_by_its_real_path(folder, tmp_path):
    other = tmp_path / "other" / folder.name
    other.mkdir(parents=True)
    (other / "data.py").write_text("NAME = 'other'\n")
    (tmp_path / "link").symlink_to(folder)
    data = import_from(folder, "data")
    assert import_from(tmp_path / "link", "data") is data
    assert import_from(other, "data").NAME == "other"
    assert data.__name__.startswith("_nd_task_v2_")
    assert Path(data.__file__).parent == folder


def test_packages_inside_of_a_folder(folder):
    (folder / "parts").mkdir()
    (folder / "parts" / "wheel.py").write_text("from ..data import Sample\n")
    wheel = import_from(folder, "parts.wheel")
    assert wheel.Sample is import_from(folder, "data").Sample


def started(place, *words, **more):
    return subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", *words],
        capture_output=True,
        text=True,
        cwd=place,
        env={"PYTHONPATH": "libraries:../libraries", **more},
    )


@pytest.mark.parametrize(
    ("start", "method"),
    [
        ("linked/train.py", "spawn"),
        ("-m train", "spawn"),
        ("-m linked.train", "spawn"),
        # Since Python 3.12 it gives a script a specification, from which `__package__` differs.
        ("-W ignore:__package__:DeprecationWarning -m cProfile -o profile linked/train.py", "fork"),
    ],
)
def test_the_same_classes_however_it_is_started(start, method, folder, tmp_path):
    """In processes of `multiprocessing`, too: the Config is the one that `load_config` finds."""
    (tmp_path / "linked").symlink_to(folder)
    place = folder if start == "-m train" else tmp_path
    run = started(place, *start.split(), "--config", folder / "maps.json", METHOD=method)
    assert (run.stdout, run.stderr) == (OUTPUT, "")


def test_a_traceback_names_the_file(folder, tmp_path):
    (folder / "train.py").write_text(
        PROGRAM.replace("    main(None, SimpleNamespace(recipe=sys.argv[2]))", "    from .data import wheel")
    )
    run = started(tmp_path, folder / "train.py")
    assert run.returncode == 1
    assert "ImportError: cannot import name 'wheel' from '_nd_task_v2_" in run.stderr
    assert f".data' ({folder}/data.py)" in run.stderr


def test_the_same_classes_in_tools(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    monkeypatch.setenv("METHOD", "fork")
    monkeypatch.chdir(tmp_path)
    train(folder / "maps.json", run_dir=tmp_path / "run")
    assert capsys.readouterr().out == OUTPUT
