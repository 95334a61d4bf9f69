"""A task's folder is one package, wherever it is, and in every process."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.task_folders import folder_of, import_from, owner_of, package_of, recipes_in

PROGRAM = """
from largebatch.task_folders import run_script

if __name__ == "__main__":
    run_script(__file__, __spec__)

import multiprocessing
import sys

from .config import Thing


def square(thing):
    return Thing(thing.value**2)


if __name__ == "__main__":
    import config  # a library of this name, not the file beside this one

    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(square, [Thing(3)])[0], config.NAME, sys.argv[2:], square.__module__)
"""
CONFIG = """
from dataclasses import dataclass


@dataclass
class Thing:
    value: int
"""


@pytest.fixture(name="folder")
def task_folder(tmp_path):
    folder = tmp_path / "my task.v2"
    folder.mkdir()
    (folder / "config.py").write_text(CONFIG)
    (folder / "train.py").write_text(PROGRAM)
    return folder


@pytest.mark.parametrize("name", ["plain", "with space", "a.b", "a_b", "übung", "__", "_2f"])
def test_names_lead_back(name, tmp_path):
    folder = tmp_path / name
    module = package_of(folder) + ".config"
    assert module.isascii()
    assert all(part.isidentifier() for part in module.split("."))
    assert folder_of(module) == folder
    assert owner_of(module) == owner_of(package_of(folder)) == package_of(folder)


def test_other_modules_belong_to_no_task():
    assert owner_of("largebatch.config") is None
    assert folder_of("largebatch.task_folders") is None


def test_folders_with_the_same_files_do_not_collide(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.py").write_text("NAME = 'other'\n")
    (tmp_path / "link").symlink_to(folder)
    assert import_from(other, "config").NAME == "other"
    assert import_from(tmp_path / "link", "config") is import_from(folder, "config") is not import_from(other, "config")


def test_modules_of_a_folder_with_an_init_and_a_package_inside(folder):
    (folder / "__init__.py").write_text("from .config import Thing\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "wheel.py").write_text("from ..config import Thing\nfrom .. import Thing as same\n")
    wheel = import_from(folder, "parts.wheel")
    assert wheel.Thing is wheel.same is import_from(folder, "config").Thing


def test_what_is_pickled_is_found_in_a_process_that_knows_nothing(folder):
    thing = import_from(folder, "config").Thing(5)
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    read = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(thing), capture_output=True, check=True)
    assert read.stdout == b"Thing(value=5)\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_script_is_a_module_of_its_folder_in_processes_too(method, folder, tmp_path):
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/config.py").write_text("NAME = 'library'\n")
    run = subprocess.run(
        [sys.executable, folder / "train.py", method, "--words", "as given"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "libraries")},
    )
    assert run.stdout == "Thing(value=9) library ['--words', 'as given'] __main__\n", run.stderr
    assert run.stderr == ""


@pytest.mark.parametrize("how", ["-m cProfile -o profile train.py", "-m train", "link.py", "elsewhere/train.py"])
def test_a_script_that_is_started_otherwise(how, folder):
    (folder / "train.py").write_text(PROGRAM.replace("import config ", "#").replace("config.NAME", "sys.argv[2]"))
    (folder / "link.py").symlink_to("train.py")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/train.py").symlink_to("../train.py")
    run = subprocess.run(
        [sys.executable, *how.split(), "fork", "x"], capture_output=True, text=True, check=False, cwd=folder
    )
    assert run.stdout.startswith("Thing(value=9) x"), run.stderr


def test_a_folder_that_is_not_there():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'largebatch\.task_folders\._2fnowhere'"):
        import_from("/nowhere", "config")


def test_recipes_are_told_from_their_schema(tmp_path):
    for name in ("a/one.json", "a/recipe.schema.json", "b/two.json", "three.json", "b/deep/four.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert recipes_in(tmp_path) == [Path(tmp_path, name) for name in ("a/one.json", "b/two.json")]
