"""The rooms of the package import each other in one order."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from paths import ROOT
from tasks import TASKS

PACKAGE = ROOT / "src/largebatch"
TEMPLATES = PACKAGE / "tools/new/templates"
ROOMS = [  # each imports only itself and what stands above it
    "words",
    "errors",
    "system",
    "task_folders",
    "batch",
    "config",
    "plan",
    "storage",
    "data",
    "model",
    "estimate",
    "optim",
    "backend",
    "run",
    "tools",
]
TORCH_FREE = [
    "__main__",
    *ROOMS[: ROOMS.index("plan") + 1],
    "storage/source_code",
    "data/order",
    "estimate/comparison",
    "tools/checkpoints",
    "tools/effective_batch",
    "tools/job",
    "tools/report",
    "tools/reported_runs",
    "tools/slurm",
]


def files_of(room):
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def modules_imported_by(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 or TEMPLATES in file.parents, f"{file} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("largebatch.") and not name.endswith("__version__"):
                yield name.split(".")[1:]


def test_every_room_has_a_place():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert sorted(ROOMS) == sorted(found - {"__init__", "__main__"})


def test_imports_go_from_lower_rows_to_upper_ones():
    wrong = set()
    for row, room in enumerate(ROOMS):
        for file in files_of(room):
            name = str(file.relative_to(PACKAGE))
            wrong |= {(name, other) for other, *_ in modules_imported_by(file) if ROOMS.index(other) > row}
    assert not wrong


@pytest.mark.parametrize("house", ["run", "tools"])
def test_no_circles_between_the_rooms_inside(house):
    """Rooms are the packages and the single files of a house."""
    imports = {}
    for file in files_of(house):
        room = file.relative_to(PACKAGE / house).with_suffix("").parts[0]
        if room != "__init__" and TEMPLATES not in file.parents:
            found = {inner for outer, inner, *_ in modules_imported_by(file) if outer == house}
            imports[room] = imports.get(room, set()) | found - {room}
    TopologicalSorter(imports).prepare()


def test_rooms_and_configs_of_tasks_that_import_no_torch():
    """One interpreter imports them all, and names the first that imports torch."""
    files = [file.relative_to(PACKAGE.parent).with_suffix("") for room in TORCH_FREE for file in files_of(room)]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files]
    program = f"""
import importlib, sys
from largebatch.task_folders import import_from
for name in {modules}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
for task in {TASKS}:
    import_from(f"recipes/{{task}}", "config")
    assert "torch" not in sys.modules, task
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
