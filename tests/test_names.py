"""Optimizers and strategies are named in one place each: an optimizer in its file, a strategy in the table."""

import re

from largebatch.config.optimizers import registered_optimizers
from largebatch.plan.strategies import SINGLE, STRATEGIES
from paths import ROOT

PACKAGE = ROOT / "src/largebatch"
# The words of other frameworks for what their scripts were launched with.
OF_OTHERS = {"tools/effective_batch/other_frameworks.py"}


def files_that_name(words):
    quoted = re.compile(rf"""(["'])({"|".join(words)})\1""")
    files = ((path.relative_to(PACKAGE).as_posix(), path) for path in PACKAGE.rglob("*.py"))
    return {name for name, path in files if quoted.search(path.read_text())}


def test_an_optimizer_is_named_in_its_file():
    for entry in registered_optimizers():
        assert files_that_name([entry.name]) == {f"config/optimizers/{entry.name}.py"}


def test_strategies_are_named_in_their_table():
    assert files_that_name([SINGLE.name, *STRATEGIES]) - OF_OTHERS == {"plan/strategies.py"}


def test_every_strategy_has_its_accelerate_config():
    assert {path.stem for path in (ROOT / "recipes/accelerate_configs").glob("*.yaml")} >= STRATEGIES.keys()
