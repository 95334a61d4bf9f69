"""Every optimizer and feature of the suite on every strategy and 1 to 4 processes, against a plain loop in one process.

    python bench/agreement.py

`tests/test_strategies.py` tries a sample of these combinations. Each trains 12 steps and is compared with the
plain PyTorch loop of `tests/reference.py`: loss, learning rate and gradient norm of each step, and weights after it.
Combinations whose batch the processes cannot share are left out, by the plan's own rule.
"""

import argparse
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, take_facts, write_verdicts

sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from jobs import JobFailed, run_job
from largebatch.config import load_config
from largebatch.errors import UserError
from largebatch.plan import resolve
from paths import STRATEGIES
from test_strategies import RECIPES, TOLERANCE, assert_same, recorded, reference


def row_of(name: str, strategy: str, world_size: int) -> dict[str, Any]:
    """One combination, and what came of it: "agrees", "differs" with where, or "failed" with why."""
    recipe, overrides, _ = RECIPES[name]
    row = {"name": name, "strategy": strategy, "world_size": world_size}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run_job(
                recorded, recipe, Path(folder, "run"), *overrides, strategy=strategy, world_size=world_size
            )
        except JobFailed as failure:
            return row | {"verdict": "failed", "reason": str(failure).strip().splitlines()[-1]}
    try:
        assert_same(result[0], reference(name))
    except AssertionError as difference:
        return row | {"verdict": "differs", "reason": str(difference).strip().splitlines()[0]}
    return row | {"verdict": "agrees"}


def can_share(name: str, world_size: int) -> bool:
    """Whether the recipe's batch divides over so many processes."""
    recipe, overrides, _ = RECIPES[name]
    try:
        resolve(load_config(recipe, overrides), world_size)
    except UserError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare every combination with a plain loop in one process.")
    parser.add_argument("--world-sizes", default="1,2,3,4")
    parser.add_argument("--output", type=Path, default=RESULTS / "agreement/agreement.json")
    options = parser.parse_args()
    world_sizes = [int(word) for word in options.world_sizes.split(",")]
    facts = take_facts(("torch", "accelerate", "deepspeed", "transformers"))
    rows = []
    for name, world_size in product(RECIPES, world_sizes):
        for strategy in STRATEGIES if can_share(name, world_size) else ():
            rows.append(row_of(name, strategy, world_size))
            print(*(f"{value!s:<16}" for value in rows[-1].values()), flush=True)
    write_verdicts(rows, "agrees", facts | {"tolerance": TOLERANCE}, options.output)


if __name__ == "__main__":
    main()
