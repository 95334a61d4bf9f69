"""`largebatch effective-batch`: the batch of a script elsewhere, and what it becomes in a recipe."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from largebatch.batch.elsewhere import FRAMEWORKS, BatchElsewhere, BatchHere, batch_here
from largebatch.batch.elsewhere_configs import read_config
from largebatch.counted import counted
from largebatch.errors import UserError
from largebatch.scaling import RULE_NAMES, ScalingRule, scaling_factor


def print_effective_batch(options: argparse.Namespace) -> None:
    """Print the answer in words, or with `options.json` as JSON.

    Raises:
        UserError: The numbers do not go together, or something is missing.
    """
    there, learning_rate = _read(options)
    here = batch_here(there, options.to_global_batch_size, options.micro_batch_size, options.world_size)
    if options.scaling is None and here.global_batch_size != there.global_batch_size:
        raise UserError(
            f"--to-global-batch-size {here.global_batch_size}: the batch was {there.global_batch_size}, and what "
            "becomes of the learning rate is yours to choose; write --scaling linear (SGD), sqrt (Adam) or none"
        )
    rule: ScalingRule = options.scaling or "none"
    factor = scaling_factor(rule, here.global_batch_size, there.global_batch_size)
    if options.json:
        print(json.dumps(_as_data(there, here, learning_rate, rule, factor), indent=2))
    else:
        print(_in_words(there, here, learning_rate, rule, factor))


def _read(options: argparse.Namespace) -> tuple[BatchElsewhere, float | None]:
    """The script's batch and learning rate, from options or a file with options."""
    if options.file is None:
        for name in ("from", "batch_size"):
            if getattr(options, name) is None:
                raise UserError(
                    f"--{name.replace('_', '-')} is missing; write it, or give a DeepSpeed JSON or a "
                    "TrainingArguments JSON"
                )
        there = BatchElsewhere(
            getattr(options, "from"),
            options.batch_size,
            options.devices,
            options.nodes,
            options.accumulation or 1,
            options.split_batches,
            options.loss,
            options.gradients,
        )
        return there, options.lr
    for name in ("batch_size", "accumulation", "split_batches", "gradients"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: {options.file} says that; leave one of them out")
    said = read_config(Path(options.file), options.nodes * options.devices)
    if getattr(options, "from") not in (None, said.framework):
        raise UserError(f"--from {getattr(options, 'from')}: {options.file} is of {said.framework}; leave --from out")
    there = BatchElsewhere(
        said.framework,
        said.batch_size,
        options.devices,
        options.nodes,
        said.accumulation,
        said.split_batches,
        options.loss,
        said.gradients,
    )
    return there, said.learning_rate if options.lr is None else options.lr


def _as_data(
    there: BatchElsewhere, here: BatchHere, learning_rate: float | None, rule: ScalingRule, factor: float
) -> dict[str, Any]:
    scaled = None if learning_rate is None else learning_rate * factor
    return {
        "there": asdict(there)
        | {
            "processes": there.processes,
            "samples_per_process": there.per_process,
            "processes_per_update": there.processes_per_update,
            "effective_batch_size": there.global_batch_size,
            "gradient_factor": there.gradient_factor,
            "learning_rate": learning_rate,
        },
        "here": asdict(here)
        | {
            "scaling": rule,
            "base_lr": learning_rate,
            "reference_batch_size": there.global_batch_size,
            "learning_rate_factor": factor,
            "learning_rate": scaled,
            "learning_rate_of_sgd": None if scaled is None else scaled * there.gradient_factor,
        },
    }


def _in_words(
    there: BatchElsewhere, here: BatchHere, learning_rate: float | None, rule: ScalingRule, factor: float
) -> str:
    lines = [
        ("effective batch", _product(there)),
        ("each process", _loads(there)),
        ("gradients", _gradients(there)),
        ("loss", _loss(there)),
        (
            "here",
            f"batch.global_batch_size {here.global_batch_size}, batch.micro_batch_size {here.micro_batch_size}; on "
            f"{counted(here.world_size, 'process', 'processes')} accumulation is {here.accumulation}",
        ),
        ("learning rate", _learning_rate(there, here, learning_rate, rule, factor)),
        ("", _in_a_recipe(there, learning_rate, rule)),
    ]
    if there.gradient_factor > 1:
        k = there.gradient_factor
        sgd = "" if learning_rate is None else f" = {learning_rate * factor * k:g}"
        lines.append(
            (
                "",
                f"gradients here are means, there they are {k} times as large: SGD needs its rate x {k}{sgd} and "
                f"its weight decay / {k}; Adam does not see it; a clipping norm is / {k}",
            )
        )
    return "\n".join(f"{name:<16}{text}" for name, text in lines)


def _product(there: BatchElsewhere) -> str:
    if FRAMEWORKS[there.framework].one_process:
        factors = f"{there.per_process} of one process, whatever its {counted(there.devices, 'device')},"
    elif there.gradients == "separate":
        factors = f"{there.per_process} of one worker"
    else:
        factors = (
            f"{there.per_process} per process x {counted(there.nodes, 'node')} x {counted(there.devices, 'device')}"
        )
    return f"{factors} x accumulation {there.accumulation} = {there.global_batch_size}"


def _loads(there: BatchElsewhere) -> str:
    loads = f"loads {there.per_process} for each backward pass"
    if FRAMEWORKS[there.framework].one_process:
        shares = " + ".join(map(str, there.per_device))
        return f"the only one {loads}, and hands them to its devices: {shares}"
    if there.split_batches:
        return f"{loads}: {there.batch_size} of the loader / {counted(there.processes, 'process', 'processes')}"
    return f"{loads}, of its own loader"


def _gradients(there: BatchElsewhere) -> str:
    if FRAMEWORKS[there.framework].one_process:
        return "of the devices' replicas are summed; the loss is one of the whole batch, so nothing is divided"
    if there.gradients == "separate":
        return (
            "of each worker are applied on their own, to weights that others have moved meanwhile (asynchronous, "
            "assumed of a parameter server; write --gradients average if it waits for all)"
        )
    if there.processes == 1:
        return "of the one process, as they are"
    processes = counted(there.processes, "process", "processes")
    if there.gradients == "sum":
        return f"are summed over {processes}, and divided by nothing"
    return f"are summed over {processes}, and divided by {there.processes}: averaged"


def _loss(there: BatchElsewhere) -> str:
    if there.loss == "mean":
        text = "a mean over the samples of a backward pass"
    elif there.gradients == "average" and there.processes > 1:
        text = (
            f"a sum over the samples of a backward pass: gradients come out {there.processes} times smaller than in "
            "one process on the same samples"
        )
    else:
        text = "a sum over the samples of a backward pass"
    if there.accumulation > 1:
        divides = FRAMEWORKS[there.framework].divides_accumulation
        by = f"{there.framework} does" if divides else "the script must, and is assumed to"
        text += f"; divided by the accumulation, {there.accumulation} ({by})"
    return text


def _learning_rate(
    there: BatchElsewhere, here: BatchHere, learning_rate: float | None, rule: ScalingRule, factor: float
) -> str:
    start = "as there" if learning_rate is None else f"{learning_rate:g}"
    if here.global_batch_size == there.global_batch_size:
        return f"{start}, because the batch is the same"
    if rule == "none":
        return f"{start}, because no rule scales it"
    batches = f"{here.global_batch_size} / {there.global_batch_size}"
    ratio = {"linear": batches, "sqrt": f"sqrt({batches})"}[rule]
    result = f"x {factor:.6g}" if learning_rate is None else f"{learning_rate * factor:.6g}"
    return f"{start} x {ratio} = {result}, by {RULE_NAMES[rule]}"


def _in_a_recipe(there: BatchElsewhere, learning_rate: float | None, rule: ScalingRule) -> str:
    """What was tuned: the recipe multiplies by itself, and a rate that was multiplied before would be once more."""
    base = "" if learning_rate is None else f"learning_rate.base_lr {learning_rate:g}, "
    return (
        f"a recipe multiplies by itself: {base}learning_rate.reference_batch_size {there.global_batch_size}, "
        f'learning_rate.scaling "{rule}"'
    )
