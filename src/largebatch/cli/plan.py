"""`largebatch plan --world-size`: the resolved plan of a recipe, explained."""

import sys
from collections.abc import Sequence
from pathlib import Path

from largebatch.config import load_config
from largebatch.plan import explain, resolve


def print_plan(path: Path, overrides: Sequence[str], world_size: int, *, as_json: bool) -> None:
    """Print the plan of the recipe at `path` for `world_size` processes."""
    plan = resolve(load_config(path, overrides), world_size)
    sys.stdout.write(plan.to_json() if as_json else explain(plan, path.stem) + "\n")
