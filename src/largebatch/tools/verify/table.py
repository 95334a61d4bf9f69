"""The table of a recipe's combinations, and its verdict."""

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterable
from functools import partial

from largebatch.config import RecipeConfig, last_of_each, load_config
from largebatch.optim.trial import try_optimizer
from largebatch.plan import resolve
from largebatch.tools.local_jobs.jobs import preload_tasks
from largebatch.tools.local_jobs.small_runs import (
    LONG,
    debug_model_overrides,
    short_schedule_overrides,
    tiny_data_overrides,
)
from largebatch.tools.plan import first_plan
from largebatch.tools.plan.accelerate_configs import find_accelerate_configs, is_rehearsed
from largebatch.tools.verify.causes import likely_cause
from largebatch.tools.verify.differences import MEASURES
from largebatch.tools.verify.verification import Combination, Row, Verification
from largebatch.words import counted

# All but the first step's.
COLUMNS = MEASURES[:-2]
LINE = "{:<9}{:>10}{:>7}{:>10}{:>11}{:>10}{:>10}{:>12}{:>12}{:>9}  {}"
HEADER = LINE.format(
    "strategy", "processes", "micro", *(name.replace("_", " ") for name in COLUMNS), "seconds", "verdict"
)


def verify(options: argparse.Namespace) -> bool:
    """Train every combination and print the table, as `run` of the command does.

    Return whether all combinations that the global batch divides over agree with the reference.
    """
    config, overrides = _small_recipe(options)
    configs = find_accelerate_configs(options.strategies, config)
    plan = resolve(config, 1)
    steps = min(options.steps, plan.total_steps)
    verification = Verification(config, options.config, overrides, configs, steps)
    combinations = _combinations(options, config, configs)
    resumes = options.resume and steps > 1 and max(options.world_sizes) > 1
    on_gpus = _choose_device(max(options.world_sizes))
    try_optimizer(plan)
    preload_tasks([verification.task])
    print(
        f"{options.config.stem}: {steps} steps of {config.precision} {config.optimizer.name} on "
        f"{'GPUs' if on_gpus else 'the CPU'}, {counted(len(combinations), 'combination')}"
        f"{' and a resumed run' if resumes else ''}, each against one process"
    )
    if overrides:
        print("the recipe is changed by", shlex.join(last_of_each(overrides)))
    if len({each.micro_batch_size for each in combinations}) == 1:
        print("not compared with another micro_batch_size: a loss that is a mean over it would go unnoticed")
    print(f"\n{HEADER}", flush=True)
    rows = _printed(verification.rows(combinations))
    resumable = [row.combination for row in rows if row.verdict == "agrees" and row.combination.world_size > 1]
    if resumes:
        if resumable:
            rows += _printed(verification.rows([dataclasses.replace(resumable[-1], resumes=True)]))
        else:
            print("no run was stopped and resumed, because no combination of several processes agrees")
    compared = [row for row in rows if row.verdict in ("agrees", "differs", "unclear", "failed")]
    allowed = verification.limits()
    agreeing = sum(row.verdict == "agrees" for row in compared)
    print(f"\n{agreeing} of {len(compared)} combinations agree with one process")
    if cause := likely_cause(rows, verification):
        print(cause)
    legend = (
        "\nDifferences are relative to the numbers of one process. Those of loss, gradient norm and learning rate are\n"
        "the largest of all steps. Update is the first one, and parameters are the final ones, of the tensor that "
        f"differs\nmost, relative to its norm. Allowed are {allowed['loss']:g}, {allowed['grad_norm']:g} for the "
        f"gradient norm, {allowed['update']:g} for the update, and {allowed['lr']:g} for the\nlearning rate. Where "
        "differences are larger, runs whose weights are perturbed by one rounding say how much rounding\nmakes of "
        f"itself, and ten times that is allowed. Taken as given: the loss is the mean over {plan.loss_unit},\nwhich "
        "the source's `weight` counts; what `run.log` gets is not compared."
    )
    if any(row.differences for row in rows):
        print(legend)
    return agreeing == len(compared)


def _small_recipe(options: argparse.Namespace) -> tuple[RecipeConfig, list[str]]:
    """The recipe with what makes it small and its schedule short, and the overrides for that."""
    load = partial(load_config, options.config, task=options.task)
    # Without a smaller batch, which may be too few steps for the warmup, and fits the micro-batch of tiny data.
    others = [each for each in options.overrides if not each.startswith("--batch")]
    large = load([LONG, *others] if options.tiny_data else options.overrides)
    tiny_data = tiny_data_overrides(large) if options.tiny_data else []
    # The command line comes last, because it overrides the recipe's debug model and tiny data.
    overrides = [*debug_model_overrides(large), *tiny_data, *options.overrides]
    config = load(overrides)
    if config.batch.finds_micro_batch_size:
        options.refuse('batch.micro_batch_size "auto": add --batch.micro_batch_size 8, a size to compare others with')
    if options.steps < resolve(config, 1).total_steps:
        overrides += short_schedule_overrides(config, options.steps)
        config = load(overrides)
    return config, overrides


def _combinations(options: argparse.Namespace, config: RecipeConfig, strategies: Iterable[str]) -> list[Combination]:
    size = config.batch.micro_batch_size
    model = config.model
    is_part_of_the_loss = model.uses_batch_norm or model.uses_dropout
    usual = [size] if size % 2 or is_part_of_the_loss else [size, size // 2]
    sizes: list[int] = options.micro_batch_sizes or usual
    for world_size in options.world_sizes:
        # Refuse a number of processes that none of the micro-batch sizes divides over.
        first_plan(config, [world_size], sizes)
    return [
        Combination(strategy, world_size, micro_batch_size)
        for micro_batch_size in sizes
        for world_size in options.world_sizes
        for strategy in strategies
        if options.strategies or is_rehearsed(strategy, world_size)
    ]


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


def _printed(rows: Iterable[Row]) -> list[Row]:
    """The rows, each of which is printed as soon as it is there."""
    printed = []
    for row in rows:
        numbers = ["-"] * len(COLUMNS)
        if row.differences:
            numbers = [f"{row.differences[name]:.1e}" for name in COLUMNS]
        each = row.combination
        seconds = f"{row.seconds:.1f}"
        verdict = row.verdict
        if each.resumes:
            verdict += ", resumed halfway from a checkpoint of one process"
        print(LINE.format(each.strategy, each.world_size, each.micro_batch_size, *numbers, seconds, verdict))
        if row.problem:
            print(f"         {row.problem}")
        sys.stdout.flush()
        printed.append(row)
    return printed
