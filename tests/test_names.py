"""Optimizers, strategies and tasks are named in one place each: an optimizer in its file, a strategy in the table."""

import re

from largebatch.config.optimizers.shipped import SHIPPED
from largebatch.plan.strategies import SINGLE, STRATEGIES
from paths import ROOT
from tasks import TASKS

PACKAGE = ROOT / "src/largebatch"
# The words of other frameworks for what their scripts were launched with.
OF_OTHERS = {"tools/effective_batch.py"}


def files_that_name(words):
    quoted = re.compile(rf"""(["'])({"|".join(words)})\1""")
    files = ((path.relative_to(PACKAGE).as_posix(), path) for path in PACKAGE.rglob("*.py"))
    return {name for name, path in files if quoted.search(path.read_text())}


def test_an_optimizer_is_named_in_its_file():
    for entry in SHIPPED:
        assert files_that_name([entry.name]) == {f"config/optimizers/{entry.name}.py"}


def test_strategies_are_named_in_their_table():
    assert files_that_name([SINGLE.name, *STRATEGIES]) - OF_OTHERS == {"plan/strategies.py"}


def test_tasks_are_named_nowhere():
    words = re.compile("|".join(rf"\b{task}\b" for task in TASKS))
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert not {path.relative_to(PACKAGE) for path in files if words.search(path.read_text(encoding="utf-8"))}


def test_only_what_reads_batch_scripts_names_the_variables_of_slurm():
    """All else is told by LARGEBATCH_…, on every kind of cluster; backend/launch.py looks for a missing launcher."""
    word = re.compile(r"\bSLURM_\w+|\bSBATCH_\w+|slurm_\w+")
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    naming = {name for name, text in files.items() if word.search(text)}
    allowed = {"backend/launch.py"} | {name for name in files if name.startswith("tools/slurm/")}
    assert naming <= allowed
