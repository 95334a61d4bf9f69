"""The effective batch of a script for another framework, and what it becomes in a recipe: in words, or as JSON."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

from largebatch.batch.scaling import RULE_NAMES, ScalingRule, scaling_factor
from largebatch.errors import UserError, counted
from largebatch.tools.effective_batch.other_configs import read_config
from largebatch.tools.effective_batch.other_frameworks import FRAMEWORKS, OtherBatch, RecipeBatch, recipe_batch


def answer(options: argparse.Namespace) -> str:
    """Return the answer in words, or with `options.json` as JSON.

    Raises:
        UserError: The numbers contradict each other, or something is missing.
    """
    script = _read(options)
    recipe = recipe_batch(script, options.to_global_batch_size, options.micro_batch_size, options.world_size)
    if options.scaling is None and recipe.global_batch_size != script.global_batch_size:
        raise UserError(
            f"--to-global-batch-size {recipe.global_batch_size}: the script's batch is {script.global_batch_size}, and "
            "how to scale the learning rate is your choice; add --scaling linear (SGD), sqrt (Adam) or none"
        )
    rule: ScalingRule = options.scaling or "none"
    factor = scaling_factor(rule, recipe.global_batch_size, script.global_batch_size)
    if not options.json:
        return _in_words(script, recipe, rule, factor)
    scaled = None if script.learning_rate is None else script.learning_rate * factor
    numbers = {
        "script": asdict(script)
        | {
            "processes": script.processes,
            "samples_per_process": script.per_process,
            "processes_per_update": script.processes_per_update,
            "effective_batch_size": script.global_batch_size,
            "gradient_factor": script.gradient_factor,
        },
        "recipe": asdict(recipe)
        | {
            "scaling": rule,
            "base_lr": script.learning_rate,
            "reference_batch_size": script.global_batch_size,
            "learning_rate_factor": factor,
            "learning_rate": scaled,
            "learning_rate_of_sgd": None if scaled is None else scaled * script.gradient_factor,
        },
    }
    return json.dumps(numbers, indent=2)


def _read(options: argparse.Namespace) -> OtherBatch:
    """The script's batch and learning rate, from options, or from a file with options."""
    if options.file is None:
        for option, value in (("--from", options.framework), ("--batch-size", options.batch_size)):
            if value is None:
                raise UserError(f"{option} is missing; add it, or give a DeepSpeed JSON or a TrainingArguments JSON")
        numbers = {field.name: getattr(options, field.name) for field in fields(OtherBatch)}
        return OtherBatch(**numbers | {"accumulation": options.accumulation or 1})
    for name in ("batch_size", "accumulation", "split_batches", "gradients"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: {options.file} already says that; remove one of them")
    script = read_config(Path(options.file), options.devices, options.nodes, options.loss)
    if options.framework not in (None, script.framework):
        raise UserError(f"--from {options.framework}: {options.file} is for {script.framework}; remove --from")
    return script if options.learning_rate is None else replace(script, learning_rate=options.learning_rate)


def _in_words(script: OtherBatch, recipe: RecipeBatch, rule: ScalingRule, factor: float) -> str:
    framework = FRAMEWORKS[script.framework]
    processes = counted(script.processes, "process", "processes")
    devices, nodes = counted(script.devices, "device"), counted(script.nodes, "node")
    combined: str = "replicas" if framework.one_process else script.gradients or "average"
    if combined in ("sum", "average") and script.processes == 1:
        combined = "one process"
    samples = {
        "replicas": f"{script.per_process} in one process, shared by its {devices},",
        "separate": f"{script.per_process} per worker",
    }.get(combined, f"{script.per_process} per process x {nodes} x {devices}")
    gradients = {
        "replicas": "are summed over the devices' replicas; the loss covers the whole batch, so nothing is divided",
        "separate": "are applied worker by worker, to weights that others have changed in the meantime (asynchronous, "
        "assumed for a parameter server; write --gradients average if it waits for all)",
        "one process": "come from one process",
        "sum": f"are summed over {processes} and not divided",
        "average": f"are summed over {processes} and divided by {script.processes}: averaged",
    }[combined]

    loads = f"loads {counted(script.per_process, 'sample')} per backward pass"
    if framework.one_process:
        loads += f" and hands them to its devices: {' + '.join(map(str, script.per_device))}"
    elif script.split_batches:
        loads += f": the loader's {script.batch_size} / {processes}"
    else:
        loads += ", from its own loader"

    loss = f"a {script.loss} over the samples of a backward pass"
    if script.loss == "sum" and combined == "average":
        loss += f": gradients are {script.processes} times smaller than in one process on the same samples"
    if script.accumulation > 1:
        by = f"by {script.framework}" if framework.divides_accumulation else "assumed; the script must do it itself"
        loss += f"; divided by the accumulation, {script.accumulation} ({by})"

    lines = {
        "effective batch": f"{samples} x accumulation {script.accumulation} = {script.global_batch_size}",
        "each process": loads,
        "gradients": gradients,
        "loss": loss,
        "recipe": f"batch.global_batch_size {recipe.global_batch_size}, batch.micro_batch_size "
        f"{recipe.micro_batch_size}; accumulation is {recipe.accumulation} on "
        f"{counted(recipe.world_size, 'process', 'processes')}",
        "learning rate": f"\n{'':<16}".join(_learning_rate(script, recipe, rule, factor)),
    }
    return "\n".join(f"{name:<16}{text}" for name, text in lines.items())


def _learning_rate(script: OtherBatch, recipe: RecipeBatch, rule: ScalingRule, factor: float) -> Iterator[str]:
    rate, k = script.learning_rate, script.gradient_factor
    start = "the script's" if rate is None else f"{rate:g}"
    ratio = f"{recipe.global_batch_size} / {script.global_batch_size}"
    if recipe.global_batch_size == script.global_batch_size:
        yield f"{start}, because the batch is the same"
    elif rule == "none":
        yield f"{start}, because it is not scaled"
    else:
        result = f"x {factor:.6g}" if rate is None else f"{rate * factor:.6g}"
        yield f"{start} x {ratio if rule == 'linear' else f'sqrt({ratio})'} = {result}, {RULE_NAMES[rule]}"
    # The rate as it was tuned: a rate that is already scaled would be scaled again.
    base = "" if rate is None else f"learning_rate.base_lr {rate:g}, "
    yield (
        f"in the recipe, write the rate before scaling: {base}learning_rate.reference_batch_size "
        f'{script.global_batch_size}, learning_rate.scaling "{rule}"'
    )
    if k > 1:
        sgd = "" if rate is None else f" = {rate * factor * k:g}"
        yield (
            f"the script's gradients are {k} times as large as the recipe's, which are means: for SGD, the rate x "
            f"{k}{sgd} and the weight decay / {k}; for Adam, no change; for clipping, the norm / {k}"
        )
