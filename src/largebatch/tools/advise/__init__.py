"""`largebatch advise`: what a batch size and a number of GPUs cost, and gain, at a given critical batch."""

import argparse
import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from largebatch.config import RecipeConfig, load_config, override_words
from largebatch.errors import ConfigError, UserError
from largebatch.plan import resolve
from largebatch.storage.run_folder import RunFolder
from largebatch.tools.advise.advice import CriticalBatch, OnGpus, steps_and_samples, table
from largebatch.tools.advise.fit import P_OF_FAILURE, doubts, fit, read_points, read_sweep
from largebatch.tools.options import (
    Commands,
    add_command,
    add_task,
    is_amount,
    positive_float,
    positive_int,
    positive_ints,
    recipe_file,
)
from largebatch.tools.plan import add_gpus, scale_model
from largebatch.tools.sweep.points import BATCH
from largebatch.words import wrapped


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "advise",
        run,
        description="Print how many steps and samples each batch size needs for the same loss and, for a recipe and a "
        "kind of GPU, how many hours and GPU-hours on each number of GPUs. At the critical batch, a run needs twice "
        "the fewest samples and twice the fewest steps (McCandlish et al. 2018, arXiv 1812.06162).",
        epilog="""examples:
  largebatch advise --critical-batch 2048
  largebatch advise --fit points.csv --steps 2000 --at-batch 256
  largebatch advise gpt2_124m --measured runs/gpt2_124m --world-sizes 8,16,32,64 --gpu h100 --network 400G/gpu

Fields are overridden as in a run: --batch.micro_batch_size 8.""",
        takes_overrides=True,
    )
    parser.add_argument("config", metavar="RECIPE", type=recipe_file, nargs="?", help="a recipe, to estimate its times")
    add_task(parser)
    sources = parser.add_mutually_exclusive_group(required=True)
    help = "folder of a finished run that measured its noise scale, or of `largebatch critical-batch`"
    sources.add_argument("--measured", type=Path, metavar="DIR", help=help)
    sources.add_argument("--critical-batch", type=positive_float, metavar="SAMPLES", help="the critical batch")
    help = (
        "fit it to runs: the folder of a sweep, with --target; or a file with the columns batch, samples to the target "
        "(mean over seeds), spread (standard deviation), seeds and, optionally, every (samples between evaluations)"
    )
    sources.add_argument("--fit", type=Path, metavar="FILE.csv|DIR", help=help)
    parser.add_argument("--target", type=float, help="the value of its metric that a sweep's runs had to reach")
    parser.add_argument("--steps", type=positive_int, help="steps to the loss; default: those of a measured run")
    parser.add_argument("--at-batch", type=positive_int, metavar="SAMPLES", help="batch size of --steps")
    help = "batch sizes; default: doublings of the recipe's or --at-batch, up to 8 times from the critical batch"
    parser.add_argument("--batches", type=positive_ints, metavar="B,B,…", help=help)
    parser.add_argument("--world-sizes", type=positive_ints, help="numbers of GPUs, such as 8,64,512")
    add_gpus(parser, parser)


def run(options: argparse.Namespace) -> int:
    """Print the advice; 1 if the points of --fit contradict the form."""
    _refuse_contradictions(options)
    if options.fit:
        points = read_points(options.fit) if options.target is None else read_sweep(options.fit, options.target)
        found = fit(points)
        print(*found.in_words(), *doubts(points), "", sep="\n")
        if found.p < P_OF_FAILURE or found.critical_batch in (0, math.inf):
            return int(found.p < P_OF_FAILURE)
        measured = (points[0].min(), points[0].max())
        critical = CriticalBatch(found.critical_batch, found.interval, f"the fit of {options.fit}", measured=measured)
    elif options.measured:
        critical = _measured(options.measured)
    else:
        critical = CriticalBatch(options.critical_batch, (), "--critical-batch")
    if options.steps:
        critical = replace(critical, run=(options.steps, options.at_batch))
    batches = options.batches or _default_batches(options, critical)
    on_gpus, problems = _on_gpus(options, critical, batches) if options.config else ([], [])
    print(*table(critical, batches, on_gpus), *(line for each in problems for line in wrapped(each)), sep="\n")
    if options.config:
        print("\n".join(_recommended(options, critical, critical.knee(batches))))
    return 0


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if options.target is not None and not options.fit:
        options.refuse("--target is that of the sweep of --fit")
    if options.fit and options.fit.is_dir() == (options.target is None):
        options.refuse("--target and the folder of a sweep as --fit require each other")
    if bool(options.steps) != bool(options.at_batch):
        options.refuse("--steps and --at-batch require each other")
    given = [bool(each) for each in (options.config, options.world_sizes, options.gpu, options.network)]
    if any(given) != all(given) or (options.overrides and not options.config):
        options.refuse("times need RECIPE, --world-sizes, --gpu and --network; without RECIPE, there are no overrides")


def _measured(folder: Path) -> CriticalBatch:
    """What was measured in the folder of `largebatch critical-batch` or of a run."""
    run = RunFolder(folder)
    branched = run.critical_batch()
    summary = run.summary()
    found: Any = branched or summary.get("noise_scale")
    samples = found.get("samples") if isinstance(found, dict) else None
    if not is_amount(samples):
        why = "no critical_batch.json or noise_scale of summary.json there has a positive number of samples"
        raise UserError(f"--measured {folder}: {why}; give a folder where it has been decided, or --critical-batch")
    if branched:
        return CriticalBatch(samples, (), f"{folder}, which saw no loss up to it")
    source = (
        f"the noise scale in {folder}, which stands in for it and grows during training. For language models under "
        "Adam it can underestimate the critical batch by orders of magnitude (Merrill et al. 2025): there, find it "
        "with `largebatch critical-batch`. The confidence is only that of the measurement"
    )
    ends = [found.get("low"), math.inf if found.get("high") is None else found["high"]]
    interval = tuple(ends) if all(is_amount(end) or end in (0, math.inf) for end in ends) else ()
    plan = run.plan()
    steps: Any = summary.get("steps")
    batch = plan.max_global_batch_size if plan else 0
    has_one_size = isinstance(steps, int) and is_amount(steps * batch) and summary.get("samples") == steps * batch
    return CriticalBatch(samples, interval, source, (steps, batch) if has_one_size else None)


def _default_batches(options: argparse.Namespace, critical: CriticalBatch) -> list[int]:
    start = critical.run[1] if critical.run else 1
    if options.config:
        start = max(size for _, size in _recipe(options).batch.sizes)
    middle = round(math.log2(critical.samples / start))
    sizes = [start * 2.0**times for times in range(middle - 3, middle + 4)]
    return [int(size) for size in sizes if size.is_integer()] or [start]


def _on_gpus(
    options: argparse.Namespace, critical: CriticalBatch, batches: list[int]
) -> tuple[list[OnGpus], list[str]]:
    """Each batch size on each number of GPUs, under the strategy that is suggested there; and what is not possible."""
    compare = scale_model(options, _recipe(options))
    possible = []
    problems = []
    for batch in batches:
        steps = steps_and_samples(critical.samples, batch, critical.run)[0] / (3600 if critical.run else 1)
        try:
            columns = compare(_recipe(options, f"--batch.global_batch_size={batch}"))["world_sizes"]
        except ConfigError as error:
            columns = [{"world_size": gpus, "problem": "; ".join(error.problems)} for gpus in options.world_sizes]
        for column in columns:
            gpus = column["world_size"]
            strategy = column.get("suggested")
            seconds = column["strategies"][strategy]["step_seconds"] if strategy else None
            if seconds:
                times = [steps * each for each in seconds.values()]
                possible.append(OnGpus(batch, gpus, strategy, [*seconds.values()], times))
            else:
                why = column["problem"] or (strategy and "its operations cannot be counted") or column["reason"]
                problems.append(f"No time for batch {batch:,} on {gpus:,} GPUs: {why}")
    return possible, problems


def _recipe(options: argparse.Namespace, *overrides: str) -> RecipeConfig:
    return load_config(options.config, [*options.overrides, *overrides], task=options.task)


def _recommended(options: argparse.Namespace, critical: CriticalBatch, batch: int) -> Iterator[str]:
    """The overrides that train the recipe at a batch size until the same loss."""
    plan = resolve(_recipe(options), 1)
    run = critical.run or (plan.total_steps, plan.max_global_batch_size)
    steps, _ = steps_and_samples(critical.samples, batch, run)
    sections: dict[str, Any] = {BATCH: batch, "train.duration": {"steps": round(steps)}}
    # A warmup keeps its samples.
    if plan.schedule.warmup:
        sections["learning_rate.warmup.duration"] = {"samples": plan.schedule.warmup}
    words = override_words(sections)
    yield f"The knee as a run{'' if critical.run else ', if the steps of the recipe reach the loss'}:"
    yield f"  {shlex.join(words)}"
    try:
        peak = resolve(_recipe(options, *words), 1).max_peak_lr
        yield f"Its peak learning rate is {peak:.4g}, by the recipe's learning_rate.scaling."
        if plan.schedule.milestones:
            yield "The moments of learning_rate.decay.at stay where they are: move them with the length of the run."
    except ConfigError as error:
        yield f"But: {'; '.join(error.problems)}"
