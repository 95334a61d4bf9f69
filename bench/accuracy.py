"""The accuracy of the embedded image recipes with three seeds, against the figures of their README.

    python bench/accuracy.py

Trains ResNet at the batch it was tuned at and at eight times that, and the vision transformer, each on two processes
under DDP. `tests/recipes/test_digits.py` keeps a short case. Takes some five minutes on two CPU cores.
"""

import argparse
import os
import sys
import tempfile
from itertools import product
from pathlib import Path

from record import RESULTS, ROOT, take_facts, write_verdicts

sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

from jobs import run_job
from paths import DIGITS, VIT_DIGITS
from recipes.test_digits import summary_of

# Recipe, global batch size, and the lowest accuracy that its README allows for.
CASES = [(DIGITS, 64, 0.97), (DIGITS, 512, 0.96), (VIT_DIGITS, 64, 0.93)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded image recipes to their accuracy.")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--output", type=Path, default=RESULTS / "accuracy/accuracy.json")
    options = parser.parse_args()
    facts, rows = take_facts(("torch", "accelerate", "transformers")), []
    for (recipe, global_batch_size, at_least), seed in product(CASES, options.seeds.split(",")):
        overrides = (f"--batch.global_batch_size={global_batch_size}", f"--seed={seed}")
        with tempfile.TemporaryDirectory() as folder:
            summary, _ = run_job(summary_of, recipe, Path(folder, "run"), *overrides)
        accuracy = summary["evaluation"]["accuracy"]
        row = {"recipe": recipe.stem, "global_batch_size": global_batch_size, "seed": int(seed), "at_least": at_least}
        rows.append(row | {"accuracy": accuracy, "verdict": "reached" if accuracy >= at_least else "missed"})
        print(*(f"{value!s:<16}" for value in rows[-1].values()), flush=True)
    write_verdicts(rows, "reached", facts, options.output)


if __name__ == "__main__":
    main()
