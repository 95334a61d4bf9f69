"""Kill -9 two hundred times: every resume works, and every run ends bit for bit as if nothing had happened.

    python bench/faults.py --kills 200

Runs a small GPT (unequal samples, ragged batches, dropout, a batch that grows, accumulation, AdamW, clipping) on two
CPU processes under DDP, FSDP2 and ZeRO-2, saving a checkpoint in the background every second step. A random process,
or all of them, is killed at a random time or at a random write, fsync, rename or deletion of a save. Each run that
comes to its end is compared with one that was not interrupted: weights, losses, learning rates, gradient norms,
evaluations, and the content of every micro-batch. Stops with an AssertionError at the first difference.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from record import RESULTS, ROOT, take_facts, write_verdicts

# The same program as the tests', with more kills.
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

from resuming import kill_many_times
from run.test_kills import WORDS


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill training processes at random and compare the results.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--strategies", default="ddp,fsdp,zero2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "faults/kills.json")
    options = parser.parse_args()
    facts = take_facts(("torch", "accelerate", "deepspeed"))
    strategies = options.strategies.split(",")
    rows = []
    for number, strategy in enumerate(strategies):
        kills = options.kills * (number + 1) // len(strategies) - options.kills * number // len(strategies)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            runs = kill_many_times(Path(folder), WORDS, strategy, kills, seed=options.seed + number)
        seconds = round(time.monotonic() - started, 1)
        row = {"strategy": strategy, "kills": kills, "runs_compared": runs, "seconds": seconds}
        rows.append(row | {"verdict": "equal"})
        print(f"{strategy}: {kills} kills, {runs} runs came to their end bit for bit, {seconds:.0f} s", flush=True)
    write_verdicts(rows, "equal", facts | {"processes": 2}, options.output)


if __name__ == "__main__":
    main()
