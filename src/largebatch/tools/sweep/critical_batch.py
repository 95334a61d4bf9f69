"""`largebatch critical-batch`: the largest batch that costs no loss at a step of a run, found by branches of it."""

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.batch import Length, Timeline
from largebatch.config import load_config, override_words, task_of
from largebatch.errors import ConfigError, UserError
from largebatch.plan import RunPlan, resolve
from largebatch.storage.layout import MANIFEST, CheckpointError, read_manifest
from largebatch.storage.run_folder import RunFolder
from largebatch.task_folders import recipes_in
from largebatch.tools.options import RECIPES, positive_float, positive_int, positive_ints, recipe_file
from largebatch.tools.slurm.submit import split_words
from largebatch.tools.sweep import add_points
from largebatch.tools.sweep.points import BATCH, Point, Sweep, check_number

EPILOG = """examples:
  largebatch critical-batch runs/gpt_pydoc --at 100 --batches 1,2,4,8 --seeds 3
  largebatch critical-batch runs/gpt2_124m --at 5000 --batches 1,2,4 --seeds 3 --slurm --nodes 4 --time=02:00:00"""

# A larger tolerance, as a part of the metric's value, gets a warning.
MAX_PART_OF_VALUE = 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(takes_overrides=True)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--recipe",
        type=recipe_file,
        help="the run's recipe, whose task's config.py is run; default: the one that RUN names, if it is in "
        f"{RECIPES}/",
    )
    parser.add_argument("--at", type=positive_int, required=True, metavar="STEP", help="step of the checkpoint")
    parser.add_argument("--batches", type=positive_ints, default=[1, 2, 4, 8], help="multiples of its batch size there")
    parser.add_argument("--window", type=positive_int, help="samples of each; default: 50 steps of the largest batch")
    parser.add_argument("--tolerance", type=positive_float, default=0.01, help="in the metric's unit; default: 0.01")
    add_points(parser, "RUN/../RUN.critical_batch_at_STEP")


def run(options: argparse.Namespace) -> int:
    """Continue a run from a checkpoint at several multiples of its batch size, under the recipe's rule, and find the
    largest whose loss is within the tolerance of the run's own (Merrill et al. 2025, arXiv 2505.23971). It is a sweep:
    the same command continues it, and `largebatch report FOLDER` has its curves.
    """
    from largebatch.tools.sweep.results import Results
    from largebatch.tools.sweep.start import start
    from largebatch.tools.sweep.verdicts import bounds, largest_within

    run = RunFolder(options.run_dir.absolute())
    recipe = options.recipe or _recorded_recipe(run)
    options.config = recipe
    checkpoint, recorded = _checkpoint_at(options.at, run)
    task = task_of(recipe)
    try:
        plan = resolve(load_config(recipe, override_words(recorded), task=task), 1)
    except ConfigError as error:
        raise ConfigError(error.problems, f"the config of {checkpoint / MANIFEST}") from error
    points = _branch_points(options, task, recorded, plan)
    sweep = Sweep(str(recipe), recorded, points, options.metric, options.higher_is_better, str(checkpoint))
    folder = options.folder or run.path.with_name(f"{run.path.name}.critical_batch_at_{options.at}")
    code = start(sweep, folder, task, options, split_words(options, ())[1])
    branches = RunFolder(folder)
    branches.critical_batch_file.unlink(missing_ok=True)
    if sweep.waiting(folder):
        return code
    results = Results.read(folder)
    print(f"\n{results.table()}")
    losses = {group.settings[BATCH]: group.losses for group in results.groups}
    batch, compared = largest_within(losses, options.tolerance)
    own = min(losses)
    value = abs(statistics.fmean(losses[own].values() or [math.inf]))
    if options.tolerance > MAX_PART_OF_VALUE * value:
        print(
            f"\nwarning: a tolerance of {options.tolerance:g} is large beside the run's own {options.metric}, "
            f"{value:.3g}: batches that are much worse may pass; write a smaller --tolerance"
        )
    print(f"\nafter step {options.at:,}, beside the run's own {own:,}, with a tolerance of {options.tolerance:g}:")
    for size, each in compared.items():
        print(f"  batch {size:,}: {each}")
    if math.inf in losses[own].values():
        print("no critical batch: a run diverged at the run's own; write an earlier or later --at")
    else:
        print(f"the critical batch is {bounds(batch, losses)}")
    sizes = [{"batch": size, **each._asdict()} for size, each in compared.items()]
    finding = {"samples": batch, "at_step": options.at, "tolerance": options.tolerance, "sizes": sizes}
    branches.write_critical_batch(finding)
    if batch and batch > own:
        sections = branch_sections(recorded, plan.timeline, options.at, batch)
        print(f"the recipe that follows:\n{json.dumps(sections, indent=2)}")
    return code


def _recorded_recipe(run: RunFolder) -> Path:
    """This project's recipe with the path that a run has recorded: a run is not trusted, so no other is read.

    Raises:
        UserError: There is none.
    """
    starts = reversed(run.history())
    recorded = next((line["recipe"] for line in starts if isinstance(line.get("recipe"), str)), "none")
    for recipe in recipes_in(RECIPES):
        # The run of a job names the copy of the recipe in its snapshot.
        if Path(recorded).parts[-3:] == recipe.parts:
            return recipe
    raise UserError(
        f"{run.path}: not a run's folder, or its recipe, {recorded}, is not in {RECIPES.absolute()}; go where it was "
        "started, or write --recipe FILE, whose task's code is run"
    )


def _checkpoint_at(step: int, run: RunFolder) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of a step, and the config that is recorded in it.

    Raises:
        UserError: There is none, or it cannot be used.
    """
    checkpoints = {entry.step: entry for entry in run.checkpoints()}
    if step not in checkpoints:
        known = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise UserError(
            f"--at {step}: {run.path} has checkpoints of the steps {known}; checkpoint.keep_every keeps more"
        )
    entry = checkpoints[step]
    try:
        if entry.problem is not None:
            raise CheckpointError(entry.problem)
        recorded = read_manifest(entry.path).config
    except CheckpointError as error:
        raise UserError(f"--at {step}: {error}; choose another checkpoint") from error
    recorded.pop("task", None)
    if "batch" not in recorded:
        raise UserError(f"--at {step}: the config in its {MANIFEST} has no batch; choose another checkpoint")
    return entry.path, recorded


def _branch_points(options: argparse.Namespace, task: Path, recorded: Mapping[str, Any], plan: RunPlan) -> list[Point]:
    """A point for each multiple of the batch size at a step, and each seed; all train on as many samples.

    Args:
        options: Those of `largebatch critical-batch`. The window becomes a multiple of all batches.
        task: The folder of the recipe's task.
        recorded: The config of the run.
        plan: Its plan.

    Raises:
        UserError: The window is longer than the rest of the run, its schedule cannot be written in samples, or there
            are too many points.
    """
    recipe = options.config
    step = options.at
    if plan.scaled_batch_size is not None:
        raise UserError('learning_rate.decay: with "batch_growth", the rate does not follow the batch: choose another')
    start = plan.timeline.at(step)
    sizes = [multiple * start.global_batch_size for multiple in sorted({1, *options.batches})]
    check_number(len(sizes) * options.seeds)
    common = math.lcm(*sizes)
    window = options.window or 50 * max(sizes)
    # Rounded up; the common multiple may be too large for a fraction.
    last_sample = start.samples_before - (-window // common) * common
    if last_sample > plan.total_samples:
        raise UserError(
            f"--window: only {plan.total_samples - start.samples_before:,} samples are left after step {step:,}, not "
            f"{last_sample - start.samples_before:,}; write fewer, or an earlier --at"
        )
    points = []
    for size in sizes:
        sections = {**recorded, **branch_sections(recorded, plan.timeline, step, size)}
        branch = load_config(recipe, override_words(sections), task=task)
        if size == start.global_batch_size and resolve(branch, 1).schedule != plan.schedule:
            raise UserError("the schedule has steps that cannot be counted in samples; write it in samples, and train")
        last_step = branch.timeline.steps_in(Length("samples", last_sample))
        for seed in range(plan.seed, plan.seed + options.seeds):
            # A run folder is not trusted to name a command.
            changes = {"train.stop_after_steps": last_step, "seed": seed, "checkpoint.then": None}
            words = override_words({**sections, **changes})
            points.append(Point(f"global_batch_size={size}_seed={seed}", {BATCH: size}, seed, words))
    return points


def branch_sections(recorded: Mapping[str, Any], timeline: Timeline, step: int, size: int) -> dict[str, Any]:
    """The sections of a recipe that change if its batch size does at a step: all moments in steps are then in samples.

    A larger batch has fewer steps.
    """
    phases = [phase for phase in timeline.phases if phase.first_step < step]
    sizes = [{"from": {"steps": phase.first_step}, "size": phase.global_batch_size} for phase in phases]
    sections = {name: _in_samples(section, timeline) for name, section in recorded.items()}
    sections["batch"]["global_batch_size"] = [*sizes, {"from": {"steps": step}, "size": size}]
    return {name: section for name, section in sections.items() if section != recorded[name]}


def _in_samples(value: Any, timeline: Timeline) -> Any:
    """A part of a config in which all moments in steps are in samples."""
    if isinstance(value, Mapping):
        if value.get("steps"):
            return {"samples": timeline.at(value["steps"]).samples_before}
        return {name: _in_samples(each, timeline) for name, each in value.items()}
    return [_in_samples(each, timeline) for each in value] if isinstance(value, list) else value
