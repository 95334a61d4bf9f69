"""Recipes: a shipped one, mutated, for `plan` and `lint`."""

from pathlib import Path
from random import Random

from fuzzing.cases import Case
from fuzzing.mutations import change_bytes, change_json, cut, insert, replace_by_kind


def case(random: Random, folder: Path) -> Case:
    """A mutated recipe beside its `config.py`."""
    file = random.choice(sorted((folder / "recipes").glob("*/*_*.json")))
    kinds = (change_bytes, cut, insert, replace_by_kind)
    random.choice(kinds if random.random() < 0.15 else (change_json,))(random, file)
    size = str(random.choice((1, 2, 8, 96, 1000)))
    plan = ["plan", str(file), "--world-size", size]
    several = ["plan", str(file), "--world-sizes", "2,8", "--gpu-memory", "80"]
    choices = (plan, plan, plan, plan, [*plan, "--json"], ["lint", str(file)], ["lint", str(file)], several)
    return Case(random.choice(choices), folder)
