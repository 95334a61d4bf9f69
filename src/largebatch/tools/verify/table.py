"""The table of a recipe's combinations, and its verdict."""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from largebatch.batch import Length
from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError
from largebatch.plan import RunPlan, resolve
from largebatch.tools.verify.jobs import preload_tasks
from largebatch.tools.verify.launch import find_accelerate_configs
from largebatch.tools.verify.tiny import debug_model_overrides, tiny_data_overrides
from largebatch.tools.verify.verification import GRAD_NORM_FACTOR, Combination, Row, Verification, plan_of

COLUMNS = (
    "strategy",
    "processes",
    "micro",
    "loss",
    "grad norm",
    "lr",
    "parameters",
    "evaluation",
    "seconds",
    "verdict",
)
LINE = "{:<9}{:>10}{:>7}{:>10}{:>11}{:>10}{:>12}{:>12}{:>9}  {}"


def verify(options: argparse.Namespace) -> bool:
    """Train every combination, print the table and write the JSON, as `run` of the command does.

    Return whether all combinations that the global batch divides over agree with the reference.
    """
    recipe: Path = options.config
    world_sizes: list[int] = options.world_sizes
    config: RecipeConfig = load_config(recipe, options.overrides)
    tiny_data = tiny_data_overrides(config) if options.tiny_data else []
    # What the user says counts more than what the recipe says for everybody.
    overrides = [*debug_model_overrides(config), *tiny_data, *options.overrides]
    config = load_config(recipe, overrides)
    if not recipe.with_name("train.py").is_file():
        raise UserError(f"there is no {recipe.with_name('train.py')}, which would train {recipe.name}; write one")
    configs = find_accelerate_configs(recipe, options.accelerate_configs, options.strategies, config)
    micro_batch_sizes = options.micro_batch_sizes or _micro_batch_sizes(config)
    combinations = [
        Combination(strategy, world_size, micro_batch_size)
        for micro_batch_size in micro_batch_sizes
        for world_size in world_sizes
        for strategy in configs
    ]
    for world_size in world_sizes:
        _require_one_that_divides(config, world_size, micro_batch_sizes)
    steps = min(options.steps, resolve(config, 1).total_steps)
    output = options.output or Path("runs") / f"{recipe.stem}.verify.json"
    _require_writable(output)
    on_gpus = _choose_device(max(world_sizes))

    preload_tasks([recipe.parent])
    verification = Verification(config, recipe, overrides, configs, steps)
    _print_title(config, recipe, micro_batch_sizes, steps, on_gpus, verification.tolerance)
    if tiny_data:
        print(f"instead of the recipe's own: tiny data, batch {config.batch.global_batch_size}")
    elif options.tiny_data:
        print("no tiny data: the recipe's own are small and always there")
    print("\n" + LINE.format(*COLUMNS), flush=True)
    rows: list[Row] = []
    for row in verification.rows(combinations):
        # The strategies of one number of processes have the same problem.
        _print_row(row, tell=not rows or row.problem != rows[-1].problem)
        rows.append(row)
    compared = [row for row in rows if row.verdict in ("agrees", "differs", "unclear", "failed")]
    agreeing = sum(row.verdict == "agrees" for row in compared)
    print(f"\n{agreeing} of {len(compared)} combinations agree with one process")
    report = {
        "recipe": str(recipe),
        "overrides": overrides,
        "steps": steps,
        "on_gpus": on_gpus,
        "tolerance": verification.tolerance,
        "tolerance_of_grad_norm": GRAD_NORM_FACTOR * verification.tolerance,
        "agree": agreeing == len(compared),
        "rows": [_finite(dataclasses.asdict(row)) for row in rows],
    }
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {output}")
    return agreeing == len(compared)


def _choose_device(processes: int) -> bool:
    """Whether there are GPUs enough for the largest job; if not, hide them, before anything has looked for them."""
    # The server that jobs are forked from must not initialize CUDA, which cannot be forked: torch counts by NVML then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # As torchrun does for several processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    on_gpus = torch.cuda.device_count() >= processes
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return on_gpus


def _require_writable(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error}; write another file") from error


def _micro_batch_sizes(config: RecipeConfig) -> list[int]:
    """The recipe's own, and half of it where that must not change anything."""
    size = config.batch.micro_batch_size
    return [size] if size % 2 or _micro_batch_is_part_of_the_loss(config) else [size, size // 2]


def _micro_batch_is_part_of_the_loss(config: RecipeConfig) -> bool:
    return config.model.uses_batch_norm or config.model.uses_dropout


def _require_one_that_divides(config: RecipeConfig, world_size: int, micro_batch_sizes: Sequence[int]) -> None:
    problems = []
    for micro_batch_size in micro_batch_sizes:
        try:
            plan_of(config, world_size, micro_batch_size)
            return
        except ConfigError as error:
            problems += [f"--world-sizes {world_size}: {problem}" for problem in error.problems]
    raise ConfigError(list(dict.fromkeys(problems)))


def _print_title(
    config: RecipeConfig, recipe: Path, micro_batch_sizes: Sequence[int], steps: int, on_gpus: bool, tolerance: float
) -> None:
    print(
        f"{recipe.stem}: {steps} steps of {config.precision} {config.optimizer.name} on "
        f"{'GPUs' if on_gpus else 'the CPU'}, each combination against one process\n"
        f"largest relative differences: at most {tolerance:g}, of the gradient's norm "
        f"{GRAD_NORM_FACTOR * tolerance:g}, none of the learning rate"
    )
    for what in _not_reached(resolve(config, 1), steps):
        print(f"not reached in these steps: {what}")
    if len(set(micro_batch_sizes)) == 1 or _micro_batch_is_part_of_the_loss(config):
        remedy = "; turn dropout off to compare it" if config.model.uses_dropout else ""
        print(f"not compared with another micro_batch_size: a loss that is a mean over it would not be noticed{remedy}")
    if config.debug_model:
        print(f"the model is the recipe's debug_model: {json.dumps(config.debug_model)}")


def _not_reached(plan: RunPlan, steps: int) -> Iterator[str]:
    """What the first steps do not show of a recipe."""
    for phase in plan.timeline.phases:
        if phase.first_step >= steps:
            yield f"batch size {phase.global_batch_size}, from step {phase.first_step} on"
    steps_per_epoch = plan.timeline.steps_in(Length("epochs", 1))
    last = plan.batch_at(steps_per_epoch - 1)
    if plan.timeline.keep_last and last.size < last.global_batch_size and steps < steps_per_epoch:
        yield f"the ragged batch at the end of the epoch, in step {steps_per_epoch}"


def _print_row(row: Row, tell: bool) -> None:
    combination, differences = row.combination, row.differences
    columns = ("loss", "grad_norm", "lr", "parameters", "evaluation")
    values = [getattr(differences, name) for name in columns] if differences else []
    numbers = [f"{value:.1e}" if value else "0" for value in values] or ["-"] * len(columns)
    seconds = f"{row.seconds:.1f}" if row.seconds else "-"
    print(
        LINE.format(
            combination.strategy, combination.world_size, combination.micro_batch_size, *numbers, seconds, row.verdict
        ),
        flush=True,
    )
    if row.problem and tell:
        print(f"         {row.problem}", flush=True)


def _finite(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
