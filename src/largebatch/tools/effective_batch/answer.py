"""The effective batch of a script for another framework, and what it becomes in a recipe: in words, or as JSON."""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from largebatch.batch.scaling import RULE_NAMES, ScalingRule, scaling_factor
from largebatch.errors import UserError, counted
from largebatch.tools.effective_batch.other_configs import read_config
from largebatch.tools.effective_batch.other_frameworks import FRAMEWORKS, OtherBatch, RecipeBatch, recipe_batch


@dataclass(frozen=True)
class Answer:
    """A script's batch, and the recipe's."""

    there: OtherBatch  # the script's numbers
    here: RecipeBatch  # the recipe's
    rule: ScalingRule  # what scales the learning rate

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by."""
        return scaling_factor(self.rule, self.here.global_batch_size, self.there.global_batch_size)

    @property
    def learning_rate(self) -> float | None:
        """The scaled learning rate, where the script's is known."""
        return None if self.there.learning_rate is None else self.there.learning_rate * self.factor


def answer(options: argparse.Namespace) -> str:
    """Return the answer in words, or with `options.json` as JSON.

    Raises:
        UserError: The numbers do not go together, or something is missing.
    """
    there = _read(options)
    here = recipe_batch(there, options.to_global_batch_size, options.micro_batch_size, options.world_size)
    if options.scaling is None and here.global_batch_size != there.global_batch_size:
        raise UserError(
            f"--to-global-batch-size {here.global_batch_size}: the batch was {there.global_batch_size}, and what "
            "becomes of the learning rate is yours to choose; write --scaling linear (SGD), sqrt (Adam) or none"
        )
    found = Answer(there, here, options.scaling or "none")
    return json.dumps(_as_data(found), indent=2) if options.json else _in_words(found)


def _read(options: argparse.Namespace) -> OtherBatch:
    """The script's batch and learning rate, from options or a file with options."""
    framework = getattr(options, "from")
    if options.file is None:
        for name, value in (("from", framework), ("batch-size", options.batch_size)):
            if value is None:
                raise UserError(f"--{name} is missing; write it, or give a DeepSpeed JSON or a TrainingArguments JSON")
        return OtherBatch(
            framework,
            options.batch_size,
            options.devices,
            options.nodes,
            options.accumulation or 1,
            options.split_batches,
            options.loss,
            options.gradients,
            options.lr,
        )
    for name in ("batch_size", "accumulation", "split_batches", "gradients"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: {options.file} says that; leave one of them out")
    said = read_config(Path(options.file), options.devices, options.nodes, options.loss)
    if framework not in (None, said.framework):
        raise UserError(f"--from {framework}: {options.file} is of {said.framework}; leave --from out")
    return said if options.lr is None else replace(said, learning_rate=options.lr)


def _as_data(found: Answer) -> dict[str, Any]:
    there, scaled = found.there, found.learning_rate
    return {
        "there": asdict(there)
        | {
            "processes": there.processes,
            "samples_per_process": there.per_process,
            "processes_per_update": there.processes_per_update,
            "effective_batch_size": there.global_batch_size,
            "gradient_factor": there.gradient_factor,
        },
        "here": asdict(found.here)
        | {
            "scaling": found.rule,
            "base_lr": there.learning_rate,
            "reference_batch_size": there.global_batch_size,
            "learning_rate_factor": found.factor,
            "learning_rate": scaled,
            "learning_rate_of_sgd": None if scaled is None else scaled * there.gradient_factor,
        },
    }


def _in_words(found: Answer) -> str:
    there, here = found.there, found.here
    processes = counted(here.world_size, "process", "processes")
    base = "" if there.learning_rate is None else f"learning_rate.base_lr {there.learning_rate:g}, "
    lines = [
        ("effective batch", _product(there)),
        ("each process", _loads(there)),
        ("gradients", _gradients(there)),
        ("loss", _loss(there)),
        (
            "here",
            f"batch.global_batch_size {here.global_batch_size}, batch.micro_batch_size {here.micro_batch_size}; on "
            f"{processes} accumulation is {here.accumulation}",
        ),
        ("learning rate", _learning_rate(found)),
        # What was tuned: a rate that was multiplied before would be once more.
        (
            "",
            f"a recipe multiplies by itself: {base}learning_rate.reference_batch_size {there.global_batch_size}, "
            f'learning_rate.scaling "{found.rule}"',
        ),
    ]
    if (k := there.gradient_factor) > 1:
        sgd = "" if found.learning_rate is None else f" = {found.learning_rate * k:g}"
        lines.append(
            (
                "",
                f"gradients here are means, there they are {k} times as large: SGD needs its rate x {k}{sgd} and "
                f"its weight decay / {k}; Adam does not see it; a clipping norm is / {k}",
            )
        )
    return "\n".join(f"{name:<16}{text}" for name, text in lines)


def _product(there: OtherBatch) -> str:
    if FRAMEWORKS[there.framework].one_process:
        factors = f"{there.per_process} of one process, whatever its {counted(there.devices, 'device')},"
    elif there.gradients == "separate":
        factors = f"{there.per_process} of one worker"
    else:
        factors = (
            f"{there.per_process} per process x {counted(there.nodes, 'node')} x {counted(there.devices, 'device')}"
        )
    return f"{factors} x accumulation {there.accumulation} = {there.global_batch_size}"


def _loads(there: OtherBatch) -> str:
    loads = f"loads {there.per_process} for each backward pass"
    if FRAMEWORKS[there.framework].one_process:
        shares = " + ".join(map(str, there.per_device))
        return f"the only one {loads}, and hands them to its devices: {shares}"
    if there.split_batches:
        return f"{loads}: {there.batch_size} of the loader / {counted(there.processes, 'process', 'processes')}"
    return f"{loads}, of its own loader"


def _gradients(there: OtherBatch) -> str:
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


def _loss(there: OtherBatch) -> str:
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


def _learning_rate(found: Answer) -> str:
    there, here = found.there, found.here
    start = "as there" if there.learning_rate is None else f"{there.learning_rate:g}"
    if here.global_batch_size == there.global_batch_size:
        return f"{start}, because the batch is the same"
    if found.rule == "none":
        return f"{start}, because no rule scales it"
    batches = f"{here.global_batch_size} / {there.global_batch_size}"
    ratio = {"linear": batches, "sqrt": f"sqrt({batches})"}[found.rule]
    result = f"x {found.factor:.6g}" if found.learning_rate is None else f"{found.learning_rate:.6g}"
    return f"{start} x {ratio} = {result}, by {RULE_NAMES[found.rule]}"
