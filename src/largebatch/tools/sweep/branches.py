"""Branches of a run: the same training up to a step, and a larger batch from there, under the recipe's own rule."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from largebatch.batch import Length, Timeline
from largebatch.config import RecipeConfig, as_json, load_config
from largebatch.config.sections import Duration
from largebatch.errors import UserError
from largebatch.plan import RunPlan, resolve
from largebatch.tools.sweep.points import BATCH, Point

STEPS_OF_A_WINDOW = 50  # of the largest batch, by default
SECTIONS = ("seed", "precision", "data", "model", "batch", "learning_rate", "optimizer", "train")
UNITS = {"epochs", "steps", "samples", "tokens"}


def branch_points(
    recorded: Mapping[str, Any],
    plan: RunPlan,
    recipe: Path,
    task: Path,
    step: int,
    multiples: Sequence[int],
    window: Duration | None,
    seeds: int,
) -> list[Point]:
    """A point for each multiple of the batch size at `step`, and each seed; all train on as many samples.

    Schedules in steps are written in samples, since a larger batch has fewer steps.

    Args:
        recorded: The run's config.json.
        plan: The run's plan.
        recipe: The recipe's file.
        task: Its task's folder.
        step: The step of the checkpoint.
        multiples: Of the batch size, increasing from 1.
        window: The training after the branch; None means `STEPS_OF_A_WINDOW`. It becomes a multiple of all batches.
        seeds: Number of seeds; the first is the run's own.

    Raises:
        UserError: The window is longer than the rest of the run, or its schedule cannot be written in samples.
    """
    if plan.scaled_batch_size is not None:
        raise UserError('learning_rate.decay: with "batch_growth", the rate does not follow the batch: choose another')
    timeline = plan.timeline
    start = timeline.at(step)
    sizes = [multiple * start.global_batch_size for multiple in multiples]
    length = STEPS_OF_A_WINDOW * max(sizes)
    if window:
        end = float(timeline.progress(step, window.length.unit) + window.length.exact)
        length = timeline.at(timeline.steps_in(Length(window.length.unit, end))).samples_before - start.samples_before
    common = math.lcm(*sizes)
    last_sample = start.samples_before + math.ceil(length / common) * common
    total = timeline.at(plan.total_steps).samples_before
    if last_sample > total:
        left = f"{last_sample - start.samples_before:,} samples, but the run has {total - start.samples_before:,} left"
        raise UserError(f"--window: {left} after step {step:,}; write a shorter one, or an earlier --at")
    base = as_json(load_config(recipe, task=task))
    sections = {name: recorded[name] for name in SECTIONS if recorded[name] != base.get(name)}
    for name in ("learning_rate", "train", "optimizer", "data"):
        if (in_samples := _in_samples(recorded[name], timeline)) != recorded[name]:
            sections[name] = in_samples
    phases = [phase for phase in timeline.phases if phase.first_step < step]
    earlier = [{"from": {"steps": phase.first_step}, "size": phase.global_batch_size} for phase in phases]
    points = []
    for size in sizes:
        changes = sections | {BATCH: [*earlier, {"from": {"steps": step}, "size": size}]}
        config: RecipeConfig = load_config(recipe, _words(changes), task=task)
        if size == start.global_batch_size and resolve(config, 1).schedule != plan.schedule:
            raise UserError(
                "the schedule is in steps that cannot be counted in samples; write it in samples, and train"
            )
        changes["train.stop_after_steps"] = config.timeline.steps_in(Length("samples", last_sample))
        for seed in range(plan.seed, plan.seed + seeds):
            words = _words(changes | {"seed": seed})
            points.append(Point(f"{BATCH.partition('.')[2]}={size}_seed={seed}", {BATCH: size}, seed, words))
    return points


def _words(changes: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={json.dumps(value)}" for name, value in changes.items()]


def _in_samples(value: Any, timeline: Timeline) -> Any:
    """A part of a config in which all moments in steps are in samples."""
    if isinstance(value, Mapping):
        if value.keys() <= UNITS and value.get("steps"):
            return {"samples": timeline.at(value["steps"]).samples_before}
        return {name: _in_samples(each, timeline) for name, each in value.items()}
    return [_in_samples(each, timeline) for each in value] if isinstance(value, list) else value
