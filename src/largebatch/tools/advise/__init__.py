"""`largebatch advise`: what a batch size and a number of GPUs cost, and gain, at a given critical batch."""

import argparse
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError, counted
from largebatch.estimate.table import digits, wrapped
from largebatch.storage.layout import read_object
from largebatch.tools.advise.advice import CriticalBatch, KnownRun, OnGpus, steps_and_samples, table
from largebatch.tools.advise.fit import P_OF_FAILURE, TUNING, Fit, fit, read_points
from largebatch.tools.options import (
    Commands,
    add_command,
    add_task,
    positive_float,
    positive_int,
    positive_ints,
    recipe_file,
)
from largebatch.tools.plan import add_gpus, scale_model

STANDARD_ERRORS = 1.96  # on each side of an interval of 95 % confidence
RANGE = 8  # default batch sizes: from the critical batch divided by this to the critical batch times this


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "advise",
        run,
        description="Print how many steps and samples each batch size needs for the same loss, from the critical "
        "batch and, for a recipe and a kind of GPU, how many hours and GPU-hours on each number of GPUs. The critical "
        "batch is where a larger batch begins to cost more samples than it saves steps: there, a run needs twice the "
        "fewest samples and twice the fewest steps (McCandlish et al. 2018, arXiv 1812.06162).",
        epilog="""examples:
  largebatch advise --critical-batch 2048 --standard-error 300
  largebatch advise --fit points.csv --steps 2000 --at-batch 256
  largebatch advise gpt2_124m --measured runs/gpt2_124m --world-sizes 8,16,32,64 --gpu h100 --network 400G/gpu

Fields are overridden as in a run: --batch.micro_batch_size 8.""",
        takes_overrides=True,
    )
    help = "estimate times for this recipe, its JSON file or name; with --world-sizes, --gpu and --network"
    parser.add_argument("config", metavar="RECIPE", type=recipe_file, nargs="?", help=help)
    add_task(parser)
    sources = parser.add_mutually_exclusive_group(required=True)
    help = "folder of a run that measured its noise scale, or of `largebatch critical-batch`"
    sources.add_argument("--measured", type=Path, metavar="DIR", help=help)
    help = "the critical batch, in samples"
    sources.add_argument("--critical-batch", type=positive_float, metavar="SAMPLES", help=help)
    help = "fit the critical batch to runs: CSV with the columns batch, samples (to the target, mean over the seeds), "
    help += "spread (their standard deviation) and seeds"
    sources.add_argument("--fit", type=Path, metavar="FILE", help=help)
    help = "standard error of --critical-batch"
    parser.add_argument("--standard-error", type=positive_float, metavar="SAMPLES", help=help)
    help = "steps to the loss at --at-batch; without them, steps and samples are multiples of the fewest"
    parser.add_argument("--steps", type=positive_int, metavar="N", help=help)
    parser.add_argument("--at-batch", type=positive_int, metavar="SAMPLES", help="batch size of --steps")
    help = "a finished run, which gives --steps and --at-batch; default: that of --measured, if it is one"
    parser.add_argument("--run", type=Path, metavar="DIR", dest="finished", help=help)
    help = "batch sizes; default: from an eighth to 8 times the critical batch, by doubling the recipe's or --at-batch"
    parser.add_argument("--batches", type=positive_ints, metavar="B,B,…", help=help)
    parser.add_argument("--world-sizes", type=positive_ints, help="numbers of GPUs, such as 8,64,512")
    add_gpus(parser, parser)
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="also plot it; needs plotly")


def run(options: argparse.Namespace) -> int:
    """Print the advice; 1 if the points of --fit contradict the form."""
    _refuse_contradictions(options)
    if options.fit:
        found = fit(read_points(options.fit))
        print("\n".join(line for text in _fit_in_words(found) for line in wrapped(text)), end="\n\n")
        if found.p < P_OF_FAILURE or found.critical_batch in (0, math.inf):
            return int(found.p < P_OF_FAILURE)
        error, interval = found.critical_batch_error, found.interval
        critical = CriticalBatch(found.critical_batch, error, interval, f"the fit of {options.fit}")
    elif options.measured:
        critical = _measured(options.measured)
    else:
        critical = _with_error(options.critical_batch, options.standard_error, "--critical-batch")
    known = _known_run(options, critical)
    batches = options.batches or _default_batches(options, critical, known)
    on_gpus, problems = _on_gpus(options, critical, known, batches) if options.config else ([], [])
    print(
        "\n".join([*table(critical, known, batches, on_gpus), *(line for each in problems for line in wrapped(each))])
    )
    if options.out:
        from largebatch.tools.advise.plot import write_plot

        write_plot(critical, known, batches, on_gpus, options.out)
        print(f"wrote {options.out}")
    return 0


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if options.standard_error and not options.critical_batch:
        options.refuse("--standard-error is that of --critical-batch; --measured and --fit have their own")
    if bool(options.steps) != bool(options.at_batch) or (options.steps and options.finished):
        options.refuse("--steps and --at-batch require each other, and --run takes the place of both")
    given = [bool(each) for each in (options.config, options.world_sizes, options.gpu, options.network)]
    if any(given) != all(given) or (options.overrides and not options.config):
        options.refuse("times need RECIPE, --world-sizes, --gpu and --network; without RECIPE, there are no overrides")
    if options.out and (options.out.suffix != ".html" or find_spec("plotly") is None):
        options.refuse('--out needs a file name that ends in .html, and plotly: pip install "largebatch[report]"')


def _fit_in_words(found: Fit) -> list[str]:
    low, high = found.interval
    text = f"B_crit {digits(found.critical_batch)} ± {digits(found.critical_batch_error)} samples, E_min "
    text += f"{digits(found.least_samples)} ± {digits(found.least_samples_error)} samples"
    if found.critical_batch == 0:
        text = f"B_crit is below {digits(high)}: the steps do not fall with the batch; add smaller batch sizes"
    elif math.isinf(found.critical_batch):
        text = f"B_crit is above {digits(low)}: the samples do not grow with the batch; add larger batch sizes"
    test = "two points determine both parameters, and cannot test the form"
    if found.degrees_of_freedom:
        verdict = (
            f"the form fails (p < {P_OF_FAILURE:g})" if found.p < P_OF_FAILURE else "the points do not contradict it"
        )
        freedom = counted(found.degrees_of_freedom, "degree of freedom", "degrees of freedom")
        test = f"chi-square {found.chi_square:.3g} on {freedom}, p = {found.p:.2g}: {verdict}"
    return [
        f"Fit of E = E_min (1 + B / B_crit) to {found.num_points} points, each with its standard error and a "
        f"tolerance of {100 * TUNING:g} % for tuning:",
        text,
        f"largest residual {100 * found.largest_residual:+.1f} %, at batch {found.worst_batch:,.0f}; {test}",
    ]


def _with_error(samples: float, error: float | None, source: str, is_noise_scale: bool = False) -> CriticalBatch:
    margin = STANDARD_ERRORS * error if error else 0
    interval = (max(samples - margin, 0.0), samples + margin) if error else None
    return CriticalBatch(samples, error, interval, source, is_noise_scale)


def _measured(folder: Path) -> CriticalBatch:
    """What was measured in the folder of `largebatch critical-batch` or of a run."""
    branched = read_object(folder / "critical_batch.json")
    found: Any = branched or read_object(folder / "summary.json").get("noise_scale")
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, int | float) or not 0 < samples < math.inf:
        raise UserError(
            f"--measured {folder}: neither critical_batch.json nor the noise_scale of summary.json is there with a "
            "positive number of samples; give a folder where it has been decided, or --critical-batch"
        )
    source = f"{'branched runs' if branched else 'the noise scale'} in {folder}"
    return _with_error(samples, found.get("standard_error"), source, is_noise_scale=not branched)


def _known_run(options: argparse.Namespace, critical: CriticalBatch) -> KnownRun | None:
    """The run that reached the loss; None if none is given, and none was measured."""
    if options.steps:
        return KnownRun(options.steps, options.at_batch)
    folder = options.finished or (options.measured if critical.is_noise_scale else None)
    if folder is None:
        return None
    summary, batch = (
        read_object(folder / "summary.json"),
        read_object(folder / "plan.json").get("max_global_batch_size"),
    )
    steps = summary.get("steps")
    if not (isinstance(steps, int) and isinstance(batch, int) and summary.get("samples") == steps * batch > 0):
        raise UserError(f"{folder} is not a finished run with one batch size; give one, or --steps and --at-batch")
    return KnownRun(steps, batch)


def _default_batches(options: argparse.Namespace, critical: CriticalBatch, known: KnownRun | None) -> list[int]:
    """The batch size of the recipe or of the known run, doubled or halved several times."""
    start = known.batch if known else 2 ** max(0, round(math.log2(critical.samples)))
    if options.config:
        config: RecipeConfig = load_config(options.config, options.overrides, task=options.task)
        start = max(size for _, size in config.batch.sizes)
    sizes = [start * 2**times for times in range(-64, 65)]
    return [int(size) for size in sizes if size % 1 == 0 and 1 / RANGE <= size / critical.samples <= RANGE] or [start]


def _on_gpus(
    options: argparse.Namespace, critical: CriticalBatch, known: KnownRun | None, batches: list[int]
) -> tuple[list[OnGpus], list[str]]:
    """Each batch size on each number of GPUs, under the strategy that is suggested there; and what is not possible."""
    compare = scale_model(options, load_config(options.config, options.overrides, task=options.task))
    possible, problems = [], []
    for batch in batches:
        words = [*options.overrides, f"--batch.global_batch_size={batch}"]
        try:
            columns = compare(load_config(options.config, words, task=options.task))["world_sizes"]
        except ConfigError as error:
            problems.append(f"Batch {batch:,}: {'; '.join(error.problems)}")
            continue
        for column in columns:
            strategy = column.get("suggested")
            seconds = column["strategies"][strategy]["step_seconds"] if strategy else None
            if seconds:
                steps, _ = steps_and_samples(critical.samples, batch, known)
                possible.append(OnGpus(batch, column["world_size"], strategy, tuple(seconds.values()), steps))
            else:
                why = column["problem"] or (strategy and "its operations cannot be counted") or column["reason"]
                problems.append(f"Batch {batch:,} on {column['world_size']:,} GPUs: {why}")
    return possible, problems
