"""The table of a recipe's combinations, and its verdict."""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from largebatch.backend.accelerate_configs import find_accelerate_configs, is_rehearsed
from largebatch.backend.trial import try_optimizer
from largebatch.batch import Length
from largebatch.config import RecipeConfig, load_config
from largebatch.errors import UserError
from largebatch.plan import RunPlan, resolve
from largebatch.task_folders import folder_of
from largebatch.tools.plan import first_plan
from largebatch.tools.verify.causes import likely_cause
from largebatch.tools.verify.differences import GRAD_NORM_FACTOR
from largebatch.tools.verify.jobs import preload_tasks
from largebatch.tools.verify.training import debug_model_overrides, short_schedule_overrides, tiny_data_overrides
from largebatch.tools.verify.verification import Combination, Row, Verification

# What a run that is stopped and resumed may take if it is not asked for.
MAX_SECONDS = 60

MEASURES = ("loss", "grad_norm", "lr", "update", "parameters", "evaluation")
LINE = "{:<9}{:>10}{:>7}{:>10}{:>11}{:>10}{:>10}{:>12}{:>12}{:>9}  {}"
HEADER = LINE.format(
    "strategy", "processes", "micro", *(name.replace("_", " ") for name in MEASURES), "seconds", "verdict"
)


def verify(options: argparse.Namespace) -> bool:
    """Train every combination, print the table and write the JSON, as `run` of the command does.

    Return whether all combinations that the global batch divides over agree with the reference.
    """
    recipe: Path = options.config
    world_sizes: list[int] = options.world_sizes
    large: RecipeConfig = load_config(recipe, options.overrides, task=options.task)
    tiny_data = tiny_data_overrides(large) if options.tiny_data else []
    # The command line comes last, because it overrides the recipe's debug model and tiny data.
    overrides = [*debug_model_overrides(large), *tiny_data, *options.overrides]
    config: RecipeConfig = load_config(recipe, overrides, task=options.task)
    train = folder_of(type(config)) / "train.py"
    if not train.is_file():
        raise UserError(f"there is no {train}, which would train {recipe.name}; write one")
    configs = find_accelerate_configs(options.accelerate_configs, options.strategies, config)
    size = config.batch.micro_batch_size
    is_part_of_the_loss = config.model.uses_batch_norm or config.model.uses_dropout
    usual_sizes = [size] if size % 2 or is_part_of_the_loss else [size, size // 2]
    micro_batch_sizes: list[int] = options.micro_batch_sizes or usual_sizes
    combinations = [
        Combination(strategy, world_size, micro_batch_size)
        for micro_batch_size in micro_batch_sizes
        for world_size in world_sizes
        for strategy in configs
        if options.strategies or is_rehearsed(strategy, world_size)
    ]
    for world_size in world_sizes:
        # Refuse a number of processes that none of the micro-batch sizes divides over.
        first_plan(config, [world_size], micro_batch_sizes)
    total_steps = resolve(config, 1).total_steps
    steps = min(options.steps, total_steps)
    if steps < total_steps:
        overrides += short_schedule_overrides(config, steps)
        config = load_config(recipe, overrides, task=options.task)
    output: Path = options.output or Path("runs") / f"{recipe.stem}.verify.json"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error}; choose another file") from error
    on_gpus = _choose_device(max(world_sizes))
    try_optimizer(resolve(config, 1))

    preload_tasks([train.parent])
    verification = Verification(config, recipe, overrides, configs, steps)
    tolerance = verification.tolerance
    print(
        f"{recipe.stem}: {steps} steps of {config.precision} {config.optimizer.name} on "
        f"{'GPUs' if on_gpus else 'the CPU'}, each combination against one process\n"
        f"relative differences may be at most {tolerance:g}, {GRAD_NORM_FACTOR * tolerance:g} for the gradient norm "
        "and 0 for the learning rate"
    )
    if steps < total_steps:
        length = config.train.duration.length
        print(f"the schedule of {total_steps:,} steps, with all of its phases, is shortened to {length}")
    for what in _not_reached(resolve(config, 1), steps):
        print(f"not reached in these steps: {what}")
    if len(set(micro_batch_sizes)) == 1 or is_part_of_the_loss:
        remedy = "; turn dropout off to compare it" if config.model.uses_dropout else ""
        print(f"not compared with another micro_batch_size: a loss that is a mean over it would go unnoticed{remedy}")
    if config.debug_model:
        print(f"the model is the recipe's debug_model: {json.dumps(config.debug_model)}")
    if tiny_data:
        replaced = ", ".join(["tiny data", *(name for name in large.tiny_data() or {} if name != "data")])
        print(f"{replaced} and a batch of {config.batch.global_batch_size} instead of the recipe's own")
    elif options.tiny_data:
        print("no tiny data: the recipe's own data is small and always available")
    print(f"\n{HEADER}", flush=True)
    rows: list[Row] = []
    for row in verification.rows(combinations):
        _print_row(row)
        # The strategies of one number of processes often have the same problem.
        if row.problem and not (rows and row.problem == rows[-1].problem):
            print(f"         {row.problem}", flush=True)
        rows.append(row)
    compared = [row for row in rows if row.verdict in ("agrees", "differs", "unclear", "failed")]
    agreeing = sum(row.verdict == "agrees" for row in compared)
    print(f"\n{agreeing} of {len(compared)} combinations agree with one process")
    if cause := likely_cause(rows, size):
        print(cause)
    resumed = _resumed(verification, rows, options.resume)
    agree = agreeing == len(compared) and (resumed is None or resumed.verdict == "agrees")
    report = {
        "recipe": str(recipe),
        "overrides": overrides,
        "steps": steps,
        "on_gpus": on_gpus,
        "tolerance": tolerance,
        "tolerance_of_grad_norm": GRAD_NORM_FACTOR * tolerance,
        "agree": agree,
        "rows": [_as_data(row) for row in rows],
        "resumed": resumed and _as_data(resumed),
    }
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {output}")
    return agree


def _resumed(verification: Verification, rows: Sequence[Row], wanted: bool | None) -> Row | None:
    """The outcome of a run that is stopped and resumed, if that is wanted, or not refused and short; printed."""
    pair = verification.pair_to_resume(rows)
    if pair is None or wanted is False:
        return None
    first, then = (row.combination for row in pair)
    what = (
        f"a run stopped halfway under {first.strategy} with {first.world_size} processes, and resumed under "
        f"{then.strategy} with {then.world_size}"
    )
    # The rows' runs of the first update took longer than what is repeated here.
    seconds = sum(row.seconds for row in pair)
    if wanted is None and seconds > MAX_SECONDS:
        print(f"not tried, because it may take {seconds:.0f} s: {what}; add --resume to the command to try it")
        return None
    row = verification.resumed(first, then)
    print(f"{row.verdict}: {what}" + (f"\n         {row.problem}" if row.problem else ""))
    return row


def _choose_device(processes: int) -> bool:
    """Whether there are enough GPUs for the largest job; if not, hide them before anything has looked for them."""
    # The server that jobs are forked from must not initialize CUDA, which cannot be forked; with this, torch counts
    # GPUs through NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # As torchrun does for several processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    on_gpus = torch.cuda.device_count() >= processes
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return on_gpus


def _not_reached(plan: RunPlan, steps: int) -> Iterator[str]:
    """The parts of a recipe that its first steps do not show."""
    for phase in plan.timeline.phases:
        if phase.first_step >= steps:
            yield f"batch size {phase.global_batch_size}, from step {phase.first_step} on"
    for group, frozen_steps in zip(plan.optimizer.groups or (), plan.frozen_steps, strict=True):
        if frozen_steps >= steps:
            yield f"the first update of {group.parameters}, in step {frozen_steps + 1}"
    if plan.mixture:
        return
    steps_per_epoch = plan.timeline.steps_in(Length("epochs", 1))
    last = plan.batch_at(steps_per_epoch - 1)
    if plan.timeline.keep_last and last.size < last.global_batch_size and steps < steps_per_epoch:
        yield f"the ragged batch at the end of the epoch, in step {steps_per_epoch}"


def _print_row(row: Row) -> None:
    values = [getattr(row.differences, name) for name in MEASURES] if row.differences else []
    numbers = [f"{value:.1e}" if value else "0" for value in values] or ["-"] * len(MEASURES)
    seconds = f"{row.seconds:.1f}" if row.seconds else "-"
    print(LINE.format(*dataclasses.astuple(row.combination), *numbers, seconds, row.verdict), flush=True)


def _as_data(row: Row) -> dict[str, Any]:
    """The row for JSON, which has no infinity: null stands for it."""
    numbers = row.differences._asdict() if row.differences else {}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return dataclasses.asdict(row) | {"differences": finite or None}
