"""The rooms of the package are those of docs/architecture.md, and import each other in its order."""

import ast
import re
import subprocess
import sys

import pytest

from paths import ROOT

PACKAGE = ROOT / "src/largebatch"
TEMPLATES = PACKAGE / "tools/new/templates"
ROWS = (ROOT / "docs/architecture.md").read_text().partition("## From launch")[0]
ROOMS = re.findall(r"^\| `(\w+)/?` \|", ROWS, re.M)
TOOLS = re.findall(r"^\| `tools/(\w+)/?` \|", ROWS, re.M)
TORCH_FREE = [*ROOMS[: ROOMS.index("plan") + 1], "tools/lint", "tools/report", "tools/command_line"]
TORCH_FREE += [
    "data/order",
    "tools/effective_batch",
    "tools/submit",
    "tools/checkpoints",
    "tools/snapshot",
    "tools/job",
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


def test_every_room_is_in_the_table():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert sorted(ROOMS) == sorted(found - {"__init__", "__main__"})


def test_every_tool_is_in_the_other_table():
    found = {path.stem for path in (PACKAGE / "tools").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert sorted(TOOLS) == sorted(found - {"__init__", "command_line", "options"})


def test_imports_go_from_lower_rows_to_upper_ones():
    wrong = set()
    for row, room in enumerate(ROOMS):
        for file in files_of(room):
            name = str(file.relative_to(PACKAGE))
            wrong |= {(name, other) for other in rooms_imported_by(file) if ROOMS.index(other) > row}
    assert not wrong


@pytest.mark.parametrize("room", TORCH_FREE)
def test_rooms_that_import_no_torch(room):
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in files_of(room)
    ]
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_test_files_have_names_of_their_own():
    """Pytest imports them by these."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
