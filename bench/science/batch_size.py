"""Result against batch size, under the rules for the learning rate that the literature compares.

    python bench/science/batch_size.py goyal_digits --seeds 5
    python bench/science/batch_size.py adam_documents --seeds 3

Chooses the base learning rate at the reference batch size first, among the experiment's, by the mean over the seeds;
then trains every rule at every batch size. The runs are a sweep, which the same command continues where it was stopped;
their results are lines of results.jsonl, and what is in there needs no runs. What stands behind `--` is given to every
run of the recipe: the data of a machine without the hub, or fewer epochs.

`--report` makes README.md and plot.svg of the lines that there are, without training; plots need matplotlib
(`pip install -e '.[bench]'`).
"""

import argparse
import os
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path

from experiments import EXPERIMENTS, ROOT
from largebatch.errors import UserError
from report import plot, summary
from runs import matrix, read_results, train, tuning
from verdicts import best_base_lr, cells_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a recipe at many batch sizes under several rules for its learning rate.",
        epilog="Behind --, overrides that every run of the recipe gets.",
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, dest="max_parallel", metavar="JOBS", help="runs at once"
    )
    parser.add_argument("--folder", type=Path, help="of the runs; default: runs/sweeps/science/<experiment>")
    parser.add_argument("--output", type=Path, help="a folder; default: bench/results/<experiment>")
    parser.add_argument("--report", action="store_true", help="only the tables and the plot")
    # Of the options of `largebatch sweep`, these are not offered.
    parser.set_defaults(num_processes=1, strategy=None, slurm=False, dry_run=False)
    before, _, behind = " ".join(["", *map(shlex.quote, sys.argv[1:])]).partition(" -- ")
    options = parser.parse_args(shlex.split(before))
    experiment = EXPERIMENTS[options.experiment]
    folder = options.output or ROOT / "bench/results" / options.experiment
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    words = shlex.split(behind)
    seeds = range(options.seeds)
    recorded = read_results(file)
    if not options.report:
        runs = options.folder or ROOT / "runs/sweeps/science" / options.experiment
        # README.md says so.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        try:
            train(experiment, tuning(experiment, seeds), file, runs, words, options)
            chosen = best_base_lr(read_results(file), experiment)
            train(experiment, matrix(experiment, chosen, seeds), file, runs, words, options)
        except UserError as error:
            parser.exit(1, f"{error.title}: {error}\n")
    results = read_results(file)
    base_lr = best_base_lr(results, experiment)
    cells = cells_of(results.values(), experiment, base_lr)
    rates = experiment.base_lrs
    command = f"python bench/science/batch_size.py {options.experiment} --seeds {options.seeds}"
    readme = folder / "README.md"
    if results == recorded and readme.exists():
        made = readme.read_text(encoding="utf-8").splitlines()[2]
    else:
        made = (
            f"`{command}{' -- ' + shlex.join(words) if words else ''}`, {time.strftime('%Y-%m-%d')}; one process a run "
            f"on {machine()}."
        )
    settings = [
        made,
        "",
        f"The base learning rate {base_lr:g} was the best of {', '.join(f'{rate:g}' for rate in rates)} "
        f"at batch {experiment.reference}"
        + (", at their end: a better one may lie beyond." if base_lr in (rates[0], rates[-1]) else "."),
    ]
    text = summary(options.experiment, cells, experiment, settings)
    readme.write_text(text + "\n![Result against batch size](plot.svg)\n", encoding="utf-8")
    plot(cells, experiment, folder / "plot.svg")
    print(text)


def machine() -> str:
    """The device and the versions that the runs were made with."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"one {platform.machine()} CPU core"
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return ", ".join([device, f"Python {platform.python_version()}", *versions])


if __name__ == "__main__":
    main()
