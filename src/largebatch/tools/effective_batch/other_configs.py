"""Reads the batch from a DeepSpeed JSON or a `TrainingArguments` JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.batch.division import nearest_multiples
from largebatch.errors import UserError
from largebatch.tools.effective_batch.other_frameworks import Loss, OtherBatch

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PER_DEVICE = "per_device_train_batch_size"


def read_config(path: Path, devices: int, nodes: int = 1, loss: Loss = "mean") -> OtherBatch:
    """Read a JSON of either kind, told apart by its keys. DeepSpeed's numbers are completed for nodes x devices.

    Raises:
        UserError: The file cannot be read, is of another kind, or does not determine the batch.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read: {error}; give a DeepSpeed JSON or a TrainingArguments JSON"
        ) from error
    # TrainingArguments may name a DeepSpeed config, but of DeepSpeed's own batch fields have only the accumulation.
    if isinstance(content, dict) and content.get(PER_DEVICE) is not None:
        numbers = _training_arguments(path, content)
    elif isinstance(content, dict) and {TRAIN, MICRO, "zero_optimization"} & content.keys():
        numbers = _deepspeed(path, content, devices * nodes)
    else:
        raise UserError(
            f"{path}: has none of {PER_DEVICE}, {TRAIN}, {MICRO} and zero_optimization, so it is neither a "
            "TrainingArguments JSON nor a DeepSpeed JSON; use --from and --batch-size instead"
        )
    return OtherBatch(devices=devices, nodes=nodes, loss=loss, **numbers)


def _training_arguments(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    if content.get("auto_find_batch_size"):
        raise UserError(
            f"{path}: auto_find_batch_size uses whatever batch fits into memory; use --from hf-trainer "
            "--batch-size with the size that it found"
        )
    accelerator = content.get("accelerator_config")
    if isinstance(accelerator, str):
        raise UserError(
            f"{path}: accelerator_config is the file {accelerator}, which may set split_batches; replace "
            "its name with its content"
        )
    return {
        "framework": "hf-trainer",
        "batch_size": _positive(path, content, PER_DEVICE),
        "accumulation": _positive(path, content, ACCUMULATION) or 1,
        "split_batches": isinstance(accelerator, dict) and accelerator.get("split_batches") is True,
        "learning_rate": _learning_rate(content.get("learning_rate")),
    }


def _deepspeed(path: Path, content: Mapping[str, Any], processes: int) -> dict[str, Any]:
    elasticity = content.get("elasticity")
    if isinstance(elasticity, dict) and elasticity.get("enabled"):
        raise UserError(
            f"{path}: elasticity lets DeepSpeed choose the batch by the number of GPUs; use --from deepspeed "
            "--batch-size with the micro-batch, and --accumulation"
        )
    train, micro, accumulation = (_positive(path, content, name) for name in (TRAIN, MICRO, ACCUMULATION))
    if train is None and micro is None:
        raise UserError(f"{path}: has neither {TRAIN} nor {MICRO}; write one of them")
    # As DeepSpeed does it: what is missing follows from the others, and accumulation is 1 where it does not.
    if train is None or micro is None:
        accumulation = accumulation or 1
    if train is not None:
        given = {name: value for name, value in ((MICRO, micro), (ACCUMULATION, accumulation)) if value is not None}
        product = math.prod(given.values()) * processes
        names = " x ".join([*given, "nodes", "devices"])
        if train % product or (len(given) == 2 and train != product):
            relation, remedy = "a multiple of ", nearest_multiples(train, product)
            if len(given) == 2:
                relation, remedy = "", f"write {product}"
            raise UserError(
                f"{path}: {TRAIN} {train} is not {relation}{names} = {' x '.join(map(str, given.values()))} x "
                f"{processes} = {product}; {remedy}, or other --devices and --nodes"
            )
        micro, accumulation = micro or train // product, accumulation or train // product
    optimizer = content.get("optimizer")
    parameters = optimizer.get("params") if isinstance(optimizer, dict) else None
    return {
        "framework": "deepspeed",
        "batch_size": micro,
        "accumulation": accumulation,
        "gradients": "sum" if content.get("gradient_allreduce_op") == "sum" else "average",
        "learning_rate": _learning_rate(parameters.get("lr") if isinstance(parameters, dict) else None),
    }


def _positive(path: Path, content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value == "auto":
        raise UserError(
            f'{path}: {name} is "auto", which the HF Trainer or Accelerate fills in at the start; give the '
            "TrainingArguments JSON instead, or write the number"
        )
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"{path}: {name} is {value!r}; write a positive whole number")
    return value


def _learning_rate(value: object) -> float | None:
    """None for "auto" too: a learning rate is not needed."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
