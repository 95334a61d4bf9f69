"""`largebatch advise`: the steps and samples that a batch size needs for the same loss, at a given critical batch."""

import argparse
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from largebatch.config import load_config, override_words
from largebatch.errors import ConfigError, UserError
from largebatch.plan import RunPlan, resolve
from largebatch.storage.run_folder import RunFolder
from largebatch.tools.advise.advice import CriticalBatch, steps_and_samples, table
from largebatch.tools.advise.fit import doubts, fit, read_points, read_sweep
from largebatch.tools.options import add_task, is_amount, positive_float, positive_ints, recipe_file
from largebatch.tools.sweep.points import BATCH

EPILOG = """examples:
  largebatch advise --critical-batch 2048
  largebatch advise --fit points.csv
  largebatch advise gpt2_124m --measured runs/gpt2_124m

Fields are overridden as in a run: --batch.global_batch_size 512."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_overrides=True)
    parser.add_argument(
        "config",
        metavar="RECIPE",
        type=recipe_file,
        nargs="?",
        help="a recipe whose run reaches the loss; without it, steps and samples are multiples of the fewest",
    )
    add_task(parser)
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--measured",
        type=Path,
        metavar="DIR",
        help="folder of a finished run that measured its noise scale",
    )
    sources.add_argument("--critical-batch", type=positive_float, metavar="SAMPLES", help="the critical batch")
    sources.add_argument(
        "--fit",
        type=Path,
        metavar="FILE.csv|DIR",
        help="fit it to runs: the folder of a sweep, with --target; or a file with the columns batch, samples (to the "
        "target, mean over seeds), spread (standard deviation), seeds and, optionally, every (samples between "
        "evaluations)",
    )
    parser.add_argument("--target", type=float, help="the value of its metric that a sweep's runs had to reach")
    parser.add_argument(
        "--batches",
        type=positive_ints,
        metavar="B,B,…",
        help="batch sizes; default: doublings of the recipe's, up to 8 times from the critical batch",
    )


def run(options: argparse.Namespace) -> int:
    """Print how many steps and samples each batch size needs for the same loss and, for a recipe, the overrides that
    train it at the batch size nearest to the critical one. At the critical batch, a run needs twice the fewest samples
    and twice the fewest steps (McCandlish et al. 2018, arXiv 1812.06162).
    """
    fits_a_sweep = options.fit is not None and options.fit.is_dir()
    if fits_a_sweep != (options.target is not None):
        options.refuse("--target and the folder of a sweep as --fit require each other")
    if options.overrides and not options.config:
        options.refuse(f"{options.overrides[0]}: without RECIPE, there are no overrides")
    if options.fit:
        points = read_sweep(options.fit, options.target) if fits_a_sweep else read_points(options.fit)
        found = fit(points)
        print(*found.in_words(), *doubts(points), "", sep="\n")
        if found.fails or found.critical_batch in (0, math.inf):
            return int(found.fails)
        measured = (points[0].min(), points[0].max())
        critical = CriticalBatch(found.critical_batch, found.interval, f"the fit of {options.fit}", measured)
    elif options.measured:
        critical = _measured(options.measured)
    else:
        critical = CriticalBatch(options.critical_batch, (), "--critical-batch")
    if not options.config:
        batches = options.batches or _doublings(1, critical.samples)
        print(*table(critical, batches, None), sep="\n")
        return 0
    plan = resolve(load_config(options.config, options.overrides, task=options.task), 1)
    if len(plan.timeline.phases) > 1:
        raise UserError(
            "advise: the recipe's batch size changes; add --batch.global_batch_size SIZE, and the train.duration that "
            "reaches the loss at that size"
        )
    own = plan.max_global_batch_size
    batches = options.batches or sorted({*_doublings(own, critical.samples), own})
    print(*table(critical, batches, (plan.total_steps, own)), sep="\n")
    print(*_recommended(options, plan, critical, batches), sep="\n")
    return 0


def _measured(folder: Path) -> CriticalBatch:
    """The noise scale that was measured in the folder of a run."""
    run = RunFolder(folder)
    if run.critical_batch_file.exists():
        raise UserError(
            f"--measured {folder}: `largebatch critical-batch` looks for a batch that costs nothing, which is below "
            "the critical batch of this model, where a run needs twice the samples; give --critical-batch"
        )
    found: Any = run.summary().get("noise_scale")
    found = found if isinstance(found, dict) else {}
    samples = found.get("samples")
    if not is_amount(samples):
        why = found.get("not_measured") or "no noise_scale of summary.json there has a positive number of samples"
        raise UserError(
            f"--measured {folder}: {why}; give the folder of a run with logging.noise_scale that measured, or "
            "--critical-batch"
        )
    source = (
        f"the noise scale in {folder}, which stands in for it and grows during training. For language models under "
        "Adam it can underestimate the critical batch by orders of magnitude (Merrill et al. 2025): there, find it "
        "with `largebatch critical-batch`. The confidence is only that of the measurement"
    )
    ends = [found.get("low"), math.inf if found.get("high") is None else found["high"]]
    if ends == [0, math.inf]:
        raise UserError(f"--measured {folder}: its noise scale may be any number of samples; measure in more steps")
    is_known = all(is_amount(end) or end in (0, math.inf) for end in ends) and ends[0] <= samples <= ends[1]
    return CriticalBatch(samples, tuple(ends) if is_known else (), source)


def _doublings(size: int, samples: float) -> list[int]:
    """The sizes that are some doublings or halvings of one, from an eighth of a number of samples to eight times it."""
    middle = round(math.log2(samples / size))
    return sorted({math.ceil(size * 2.0**times) for times in range(middle - 3, middle + 4)})


def _recommended(
    options: argparse.Namespace, plan: RunPlan, critical: CriticalBatch, batches: list[int]
) -> Iterator[str]:
    """The overrides that train the recipe at the knee until the same loss."""
    batch = critical.knee(batches)
    steps, _ = steps_and_samples(critical.samples, batch, (plan.total_steps, plan.max_global_batch_size))
    sections: dict[str, Any] = {BATCH: batch, "train.duration": {"steps": round(steps)}}
    # A warmup keeps its samples.
    if plan.schedule.warmup:
        sections["learning_rate.warmup.duration"] = {"samples": plan.schedule.warmup}
    words = override_words(sections)
    yield "The knee as a run:"
    yield f"  {shlex.join(words)}"
    try:
        knee = resolve(load_config(options.config, [*options.overrides, *words], task=options.task), 1)
        yield f"Its peak learning rate is {knee.max_peak_lr:.4g}, by the recipe's learning_rate.scaling."
        if plan.schedule.milestones:
            yield "The moments of learning_rate.decay.at stay where they are: move them with the length of the run."
    except ConfigError as error:
        yield f"But: {'; '.join(error.problems)}"
