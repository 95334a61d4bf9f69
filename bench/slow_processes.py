"""Whether processes are wrongly named as slow: clean runs on CPU processes that share cores, and planted runs.

    python bench/slow_processes.py

Every process of a clean run does the same work, so each one that is named is a false alarm. In a planted run, rank 1
takes 1.5 times as long for its matrix product, or waits for its data. Takes about five minutes on two cores.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from jobs import run_job, train  # noqa: E402
from largebatch.storage.files import read_json_lines  # noqa: E402
from paths import DIGITS, PYDOC  # noqa: E402
from record import Figure, Record, add_output_options, take_facts, write_record  # noqa: E402

STEPS_BETWEEN = 4
SECONDS_WAITED = 0.05
COMMON = (f'--evaluation.every={{"steps": {STEPS_BETWEEN}}}', "--logging.trackers=[]")
GPT = (
    "--data.num_eval_samples=32",
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--data.block_size=16",
)
SMALL_IMAGES = ("--data.image_size=16", "--batch.micro_batch_size=4", "--evaluation.max_samples=32")
RECIPES = {
    "language model": (PYDOC, (*GPT, "--batch.global_batch_size=48", "--batch.micro_batch_size=4")),
    "images, read by the processes": (DIGITS, SMALL_IMAGES),
    "images, read by loader processes": (DIGITS, (*SMALL_IMAGES, "--data.num_workers=1")),
}
ABOUT = f"""How often a process is named as slow in training on CPU processes that share cores. Each evaluation, every
{STEPS_BETWEEN} steps, is a probe. In clean runs all processes do the same, so each name is a false alarm; in planted
runs rank 1 takes 1.5 times as long for the matrix product, or waits {SECONDS_WAITED:g} s for each micro-batch, and
nobody else may be named. "Over the limit" counts the processes that were slow
in a single probe, of which three in a row are needed."""


def train_and_count(folder: Path, name: str, probes: int, planted: str) -> tuple[int, int]:
    """Train with this many probes; return how many there were, and how many processes were over the limit in one."""
    from largebatch.run.record.metrics import StepMetrics
    from largebatch.run.watch import slow_processes

    compare, product = slow_processes.slow_ranks, slow_processes.seconds_of_product
    timed = StepMetrics.timed
    counts = [0, 0]

    def counting(seconds: Any, min_excess: float) -> Any:
        found = compare(seconds, min_excess)
        # Each probe compares two numbers, of which the product's has no minimum.
        counts[0] += min_excess == 0.0
        counts[1] += len(found)
        return found

    slow_processes.slow_ranks = counting
    if os.environ["RANK"] == "1" and planted == "the matrix product":
        slow_processes.seconds_of_product = lambda device: 1.5 * product(device)
    if os.environ["RANK"] == "1" and planted == "data reading":
        StepMetrics.timed = lambda self, batches: timed(self, _waiting(batches))
    recipe, words = RECIPES[name]
    train(recipe, *COMMON, *words, f"--train.stop_after_steps={probes * STEPS_BETWEEN}", run_dir=folder / "run")
    return counts[0], counts[1]


def _waiting(batches: Iterator[Any]) -> Iterator[Any]:
    """As from a slow disk."""
    for batch in batches:
        time.sleep(SECONDS_WAITED)
        yield batch


def measure(name: str, world_size: int, probes: int, planted: str = "") -> tuple[int, int, list[str]]:
    """Probes, processes over the limit in one of them, and the names in the history, as "rank: what"."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_job(train_and_count, Path(folder), name, probes, planted, world_size=world_size)
        history = read_json_lines(Path(folder, "run/history.jsonl"))
    named = [f"{line['rank']}: {line['what']}" for line in history if line["event"] == "slow_process"]
    print(f"{name}, {world_size} processes, planted {planted or 'nothing'}: {results[0]}, named {named}", flush=True)
    return *results[0], named


def main() -> None:
    parser = argparse.ArgumentParser(description="Count false alarms of the probes that find slow processes.")
    parser.add_argument("--probes", type=int, default=60, help="per run; default: 60")
    parser.add_argument("--runs", type=int, default=3, help="of each kind; default: 3")
    add_output_options(parser, "slow_processes")
    options = parser.parse_args()
    facts = take_facts(["torch", "accelerate"])
    clean = [
        (name, world_size, measure(name, world_size, options.probes))
        for name in RECIPES
        for world_size in (2, 4)
        for _ in range(options.runs)
    ]
    planted = {
        what: [measure("images, read by the processes", 4, options.probes // 4, what) for _ in range(options.runs)]
        for what in ("the matrix product", "data reading")
    }
    compared = sum(2 * world_size * probes for _, world_size, (probes, _, _) in clean)
    figures = [
        Figure("false alarms per clean run", "", [len(named) for _, _, (_, _, named) in clean], at_most=0),
        Figure("clean runs", "", [len(clean)]),
        Figure("probes in clean runs, all together", "", [sum(probes for _, _, (probes, _, _) in clean)]),
        Figure(
            "over the limit in a clean probe, of all comparisons",
            "%",
            [100 * sum(over for _, _, (_, over, _) in clean) / compared],
        ),
    ]
    for what, runs in planted.items():
        right = [f"1: {what}" in named and all(each == f"1: {what}" for each in named) for _, _, named in runs]
        share = 100 * sum(right) / len(right)
        figures.append(Figure(f"planted in {what}: runs that name rank 1 and no other", "%", [share], at_least=100))
    alarms = sum(len(named) for _, _, (_, _, named) in clean)
    record = Record(
        "slow_processes",
        "Slow processes",
        ABOUT,
        {"probes per run": options.probes, "runs of each kind": options.runs, "processes": [2, 4]},
        facts,
        figures=figures,
        remarks=[f"{alarms} false alarms in {len(clean)} clean runs."],
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
