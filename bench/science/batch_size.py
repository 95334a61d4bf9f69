"""Result against batch size, under the rules for the learning rate that the literature compares.

    python bench/science/batch_size.py goyal_digits --seeds 5
    python bench/science/batch_size.py adam_pydoc --seeds 3
    python bench/science/batch_size.py goyal_cifar10 --seeds 5 --jobs 1        # on a GPU

Chooses the base learning rate at the reference batch size first, among the experiment's, by the mean over the seeds;
then trains every rule at every batch size, each a normal run of the recipe in a process of its own. Each run is a line
of results.jsonl as it ends, and the same command goes on where it was stopped. What stands behind `--` is given to
every run of the recipe: the data of a machine without the hub, or fewer epochs.

`--report` makes README.md and plot.svg of the lines that there are, without training; plots need matplotlib
(`pip install -e '.[bench]'`).
"""

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from experiments import EXPERIMENTS, ROOT
from report import plot, summary
from runs import Result, make_runs, matrix, read_results, sweep
from verdicts import best_base_lr, cells_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a recipe at many batch sizes under several rules for its learning rate.",
        epilog="Behind --, overrides that every run of the recipe gets.",
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once")
    parser.add_argument("--output", type=Path, help="a folder; default: bench/results/<experiment>")
    parser.add_argument("--report", action="store_true", help="only the tables and the plot")
    before, _, behind = " ".join(["", *map(shlex.quote, sys.argv[1:])]).partition(" -- ")
    options = parser.parse_args(shlex.split(before))
    experiment = EXPERIMENTS[options.experiment]
    folder = options.output or ROOT / "bench/results" / options.experiment
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    words, seeds = tuple(shlex.split(behind)), range(options.seeds)
    if not options.report:
        show(make_runs(experiment, sweep(experiment, seeds), file, words, options.jobs))
        chosen = best_base_lr(read_results(file), experiment)
        show(make_runs(experiment, matrix(experiment, chosen, seeds), file, words, options.jobs))
    results = read_results(file)
    base_lr = best_base_lr(results, experiment)
    cells = cells_of(results.values(), experiment, base_lr)
    rates = experiment.base_lrs
    command = f"python bench/science/batch_size.py {options.experiment} --seeds {options.seeds}"
    settings = [
        f"`{command}{' -- ' + shlex.join(words) if words else ''}`, {time.strftime('%Y-%m-%d')}; one process a run on "
        f"{machine()}.",
        "",
        f"The base learning rate {base_lr:g} was the best of {', '.join(f'{rate:g}' for rate in rates)} "
        f"at batch {experiment.reference}"
        + (", at their end: a better one may lie beyond." if base_lr in (rates[0], rates[-1]) else "."),
    ]
    text = summary(options.experiment, cells, experiment, settings)
    (folder / "README.md").write_text(text + "\n![Result against batch size](plot.svg)\n", encoding="utf-8")
    plot(cells, experiment, folder / "plot.svg")
    print(text)


def show(results: Iterator[Result]) -> None:
    """A line for each run as it ends."""
    for result in results:
        point = result.point
        value = "diverged" if result.diverged else f"{result.value:.4f}"
        print(
            f"{point.rule:>28}  batch {point.batch:>6}  base_lr {point.base_lr:<7g} seed {point.seed}: {value}  "
            f"({result.seconds:.0f} s)",
            flush=True,
        )


def machine() -> str:
    """The device and the versions that the runs were made with."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"one {platform.machine()} CPU core"
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return ", ".join([device, f"Python {platform.python_version()}", *versions])


if __name__ == "__main__":
    main()
