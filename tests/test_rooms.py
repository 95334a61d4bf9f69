"""The rooms of the package import each other in one order."""

import ast
import subprocess
import sys

from paths import ROOT

PACKAGE = ROOT / "src/largebatch"
TEMPLATES = PACKAGE / "tools/new/templates"
ROOMS = [  # each imports only itself and what stands above it
    "errors",
    "failures",
    "task_folders",
    "named",
    "local_folder",
    "installed",
    "batch",
    "config",
    "plan",
    "storage",
    "source_code",
    "data",
    "model",
    "estimate",
    "optim",
    "backend",
    "checkpoint",
    "run",
    "tools",
]
TORCH_FREE = [
    *ROOMS[: ROOMS.index("plan") + 1],
    "source_code",
    "data/order",
    "estimate/comparison",
    "estimate/hardware",
    "tools/checkpoints",
    "tools/command_line",
    "tools/effective_batch",
    "tools/job",
    "tools/report",
    "tools/slurm",
]


def files_of(room):
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def rooms_imported_by(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 or TEMPLATES in file.parents, f"{file} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("largebatch.") and not name.endswith("__version__"):
                yield name.split(".")[1]


def test_every_room_has_a_place():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert sorted(ROOMS) == sorted(found - {"__init__", "__main__"})


def test_imports_go_from_lower_rows_to_upper_ones():
    wrong = set()
    for row, room in enumerate(ROOMS):
        for file in files_of(room):
            name = str(file.relative_to(PACKAGE))
            wrong |= {(name, other) for other in rooms_imported_by(file) if ROOMS.index(other) > row}
    assert not wrong


def test_rooms_that_import_no_torch():
    """One interpreter imports them all; only if that has torch, each is looked at by itself."""
    modules = {
        room: [
            ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            for file in files_of(room)
        ]
        for room in TORCH_FREE
    }

    def import_torch(names):
        program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
        return subprocess.run([sys.executable, "-c", program], check=False).returncode != 0

    if import_torch(name for names in modules.values() for name in names):
        assert [room for room, names in modules.items() if import_torch(names)] == []
        raise AssertionError("torch is imported by several rooms together")


def test_test_files_have_names_of_their_own():
    """Pytest imports them by these."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
