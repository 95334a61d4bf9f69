"""Branches of a run: the same training up to a step, and a larger batch from there, under the recipe's own rule."""

import argparse
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.batch import Length, Timeline
from largebatch.config import RecipeConfig, load_config, override_words
from largebatch.errors import UserError
from largebatch.plan import RunPlan, resolve
from largebatch.storage.files import remove_folder
from largebatch.tools.sweep.points import BATCH, Point

STEPS_OF_A_WINDOW = 50  # of the largest batch, by default
UNITS = {"epochs", "steps", "samples", "tokens"}


def branch_points(options: argparse.Namespace, task: Path, recorded: Mapping[str, Any], plan: RunPlan) -> list[Point]:
    """A point for each multiple of the batch size at a step, and each seed; all train on as many samples.

    Args:
        options: Those of `largebatch critical-batch`. The window becomes a multiple of all batches.
        task: The folder of the recipe's task.
        recorded: The config of the run.
        plan: Its plan.

    Raises:
        UserError: The window is longer than the rest of the run, or its schedule cannot be written in samples.
    """
    recipe, step = options.config, options.at
    if plan.scaled_batch_size is not None:
        raise UserError('learning_rate.decay: with "batch_growth", the rate does not follow the batch: choose another')
    start, total = plan.timeline.at(step), plan.timeline.at(plan.total_steps).samples_before
    sizes = [multiple * start.global_batch_size for multiple in sorted({1, *options.batches})]
    common = math.lcm(*sizes)
    last_sample = start.samples_before + math.ceil((options.window or STEPS_OF_A_WINDOW * max(sizes)) / common) * common
    if last_sample > total:
        left = f"{last_sample - start.samples_before:,} samples, but the run has {total - start.samples_before:,} left"
        raise UserError(f"--window: {left} after step {step:,}; write a shorter one, or an earlier --at")
    points = []
    for size in sizes:
        sections = {**recorded, **branch_sections(recorded, plan.timeline, step, size)}
        branch: RecipeConfig = load_config(recipe, override_words(sections), task=task)
        if size == start.global_batch_size and resolve(branch, 1).schedule != plan.schedule:
            raise UserError("the schedule has steps that cannot be counted in samples; write it in samples, and train")
        last_step = branch.timeline.steps_in(Length("samples", last_sample))
        sections["train"] |= {"stop_after_steps": last_step}
        for seed in range(plan.seed, plan.seed + options.seeds):
            words = override_words({**sections, "seed": seed})
            points.append(Point(f"global_batch_size={size}_seed={seed}", {BATCH: size}, seed, words))
    return points


def branch_off(checkpoint: Path, run_dir: Path) -> None:
    """Make the folder of a run that stands at a checkpoint of another run.

    They share its files, which never change; each deletes its own links.

    Raises:
        UserError: The file system does not allow this.
    """
    new = run_dir.with_name(f".{run_dir.name}.new")
    try:
        remove_folder(new)
        shutil.copytree(checkpoint, new / "checkpoints" / checkpoint.name, copy_function=os.link)
        for name in ("plan.json", "config.json"):
            shutil.copy(checkpoint.parent.parent / name, new)
        new.rename(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir}: {error}; choose a --folder on the file system of {checkpoint}") from None


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
        if value.keys() <= UNITS and value.get("steps"):
            return {"samples": timeline.at(value["steps"]).samples_before}
        return {name: _in_samples(each, timeline) for name, each in value.items()}
    return [_in_samples(each, timeline) for each in value] if isinstance(value, list) else value
