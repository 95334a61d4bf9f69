"""Kill a task of the array that prepares a text, fifty times, and compare the tokens with the text.

    sudo python bench/prepared_array.py [--kills 50]

The shipped `slurm/prepare.sbatch` is an array of three tasks on the test cluster (tests/cluster/slurm_cluster.py). All
processes of a random task are killed at a random moment after the first has begun to write. Every shard that was
finished must have the checksums in its JSON, and must still be the same file when a second array has finished the
others; the tokens must then be those of the text. Takes some fifteen minutes.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np

from prepared import wrong_files
from record import RESULTS, ROOT, take_facts, write_verdicts

# The same array as the test's, with more kills.
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/cluster")]

from preparing_array import NUM_TASKS, PreparingArray  # noqa: E402
from slurm_cluster import Cluster  # noqa: E402

ROWS = 48_000  # 48 MB, 48 shards
MAX_SECONDS = 3.0  # from the first token to the kill; an array takes about as long


def survive_kills(kills: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each kill."""
    random = np.random.default_rng(0)
    cluster = Cluster(NUM_TASKS, folder / "cluster.log")
    array = PreparingArray(cluster, folder, ROWS)
    for kill in range(kills):
        seconds, task = float(random.uniform(0.0, MAX_SECONDS)), int(random.integers(NUM_TASKS))
        # A process that its killed script was just starting lives on, and may still write to the earlier one.
        array.home = folder / f"home_{kill}"
        job = array.submit()
        array.wait_for(array.has_begun)
        time.sleep(seconds)
        with suppress(CalledProcessError):  # Slurm refuses where the task has ended.
            array.kill(job, task)
        array.wait_for(lambda job=job: array.has_ended(job))
        finished, is_whole = array.shards(), bool(array.manifests())
        wrong = wrong_files(finished)
        job = array.submit()
        array.wait_for(lambda job=job: array.has_ended(job))
        if not finished.items() <= array.shards().items():
            wrong.append("finished shards were written again")
        if array.tokens() != array.expected_tokens():
            wrong.append("tokens")
        row = {"number": kill + 1, "task": task, "seconds": round(seconds, 2)}
        yield row | {
            "finished shards": len(finished),
            "ended by itself": is_whole,
            "verdict": "wrong" if wrong else "right",
            "wrong": wrong,
        }
    cluster.close()


def main() -> None:
    """Kill, compare and write."""
    parser = argparse.ArgumentParser(description="Kill tasks of an array that prepares data, and compare its tokens.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS / "prepared/array.json")
    options = parser.parse_args()
    facts, rows = take_facts(("datasets", "tokenizers", "transformers", "numpy")), []
    with tempfile.TemporaryDirectory() as folder:
        for row in survive_kills(options.kills, Path(folder)):
            rows.append(row)
            print(*(f"{value!s:<8}" for value in row.values()), flush=True)
    write_verdicts(rows, "right", facts, options.output)


if __name__ == "__main__":
    main()
