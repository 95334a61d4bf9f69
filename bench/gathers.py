"""Compare training with weights gathered in bf16 and in fp32 for every kind of model, both policies, fsdp and hsdp.

    python bench/gathers.py

`tests/backend/test_gathers.py` tries a sample of these combinations. Each trains 4 steps both ways. Losses,
gradient norms, evaluations, and weights after the first and the last step must agree to the last bit.
"""

import argparse
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, take_facts, write_verdicts

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/backend")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from test_gathers import RECIPES, differences, trained_both_ways  # noqa: E402

from jobs import JobFailed  # noqa: E402
from largebatch.config import load_config  # noqa: E402

POLICIES = ("each_micro_batch", "last_micro_batch")
# hsdp on four processes: two replicas of two.
PLACES = [("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]


def row_of(name: str, strategy: str, world_size: int, accumulation: int, policy: str) -> dict[str, Any]:
    """Run a combination and return it with its verdict: "equal", "differs" with where, or "failed" with why."""
    recipe, words, _ = RECIPES[name]
    batch = load_config(recipe, words).batch.global_batch_size // (world_size * accumulation)
    words = [word for word in words if "micro_batch_size" not in word]
    words += [f"--batch.micro_batch_size={batch}", f"--compute.reduce_gradients={policy}"]
    row = {
        "name": name,
        "strategy": strategy,
        "world_size": world_size,
        "accumulation": accumulation,
        "reduced with": policy,
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            half, full = trained_both_ways(Path(folder), recipe, words, strategy, world_size)
        except JobFailed as failure:
            return row | {"verdict": "failed", "reason": str(failure).strip().splitlines()[-1]}
    found = differences(half[0], full[0])
    return row | ({"verdict": "differs", "reason": ", ".join(found)} if found else {"verdict": "equal"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare gathers in bf16 with gathers in fp32, bit by bit.")
    parser.add_argument("--output", type=Path, default=RESULTS / "gathers/gathers.json")
    options = parser.parse_args()
    facts, rows = take_facts(("torch", "accelerate", "transformers")), []
    for name, place, accumulation, policy in product(RECIPES, PLACES, (1, 2), POLICIES):
        rows.append(row_of(name, *place, accumulation, policy))
        print(*(f"{value!s:<24}" for value in rows[-1].values()), flush=True)
    write_verdicts(rows, "equal", facts, options.output)


if __name__ == "__main__":
    main()
