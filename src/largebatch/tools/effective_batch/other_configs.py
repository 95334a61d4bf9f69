"""What a DeepSpeed JSON or a `TrainingArguments` JSON says of the batch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.errors import UserError
from largebatch.tools.effective_batch.other_frameworks import Loss, OtherBatch

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PER_DEVICE = "per_device_train_batch_size"


def read_config(path: Path, devices: int, nodes: int = 1, loss: Loss = "mean") -> OtherBatch:
    """Read a JSON of either kind; which one it is, its keys say. DeepSpeed's numbers are completed by nodes x devices.

    Raises:
        UserError: The file cannot be read, is of another kind, or does not say one batch.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read: {error}; give a DeepSpeed JSON or a TrainingArguments JSON"
        ) from error
    # TrainingArguments may name a DeepSpeed config, but have no batch of DeepSpeed's names but the accumulation.
    if isinstance(content, dict) and PER_DEVICE in content:
        said = _training_arguments(path, content)
    elif isinstance(content, dict) and {TRAIN, MICRO, "zero_optimization"} & content.keys():
        said = _deepspeed(path, content, devices * nodes)
    else:
        raise UserError(
            f"{path}: has none of {PER_DEVICE}, {TRAIN}, {MICRO} and zero_optimization, so it is neither a "
            "TrainingArguments JSON nor a DeepSpeed JSON; write --from and --batch-size instead"
        )
    return OtherBatch(devices=devices, nodes=nodes, loss=loss, **said)


def _training_arguments(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    if content.get("auto_find_batch_size"):
        raise UserError(
            f"{path}: auto_find_batch_size takes whatever batch fits into memory; write --from hf-trainer "
            "--batch-size with the one that it found"
        )
    accelerator = content.get("accelerator_config")
    if isinstance(accelerator, str):
        raise UserError(
            f"{path}: accelerator_config is the file {accelerator}, which may say split_batches; write what is in it "
            "in its place"
        )
    return {
        "framework": "hf-trainer",
        "batch_size": _positive(path, content, PER_DEVICE),
        "accumulation": _positive(path, content, ACCUMULATION) if ACCUMULATION in content else 1,
        "split_batches": isinstance(accelerator, dict) and accelerator.get("split_batches") is True,
        "learning_rate": _learning_rate(content.get("learning_rate")),
    }


def _deepspeed(path: Path, content: Mapping[str, Any], processes: int) -> dict[str, Any]:
    elasticity = content.get("elasticity")
    if isinstance(elasticity, dict) and elasticity.get("enabled"):
        raise UserError(
            f"{path}: elasticity lets DeepSpeed choose the batch by the number of GPUs; write --from deepspeed "
            "--batch-size with the micro-batch, and --accumulation"
        )
    train, micro, accumulation = (
        _positive(path, content, name) if content.get(name) is not None else None
        for name in (TRAIN, MICRO, ACCUMULATION)
    )
    if train is None:
        if micro is None:
            raise UserError(f"{path}: has neither {TRAIN} nor {MICRO}; write one of them")
        train = micro * (accumulation or 1) * processes
    # As DeepSpeed does: what is missing follows from the others, and accumulation is 1 where it does not.
    elif micro is None:
        accumulation = accumulation or 1
        micro = _divide(path, train, {ACCUMULATION: accumulation}, processes)
    elif accumulation is None:
        accumulation = _divide(path, train, {MICRO: micro}, processes)
    accumulation = accumulation or 1
    if train != micro * accumulation * processes:
        fitting, rest = divmod(train, micro * accumulation)
        remedy = f"{TRAIN} {micro * accumulation * processes}"
        if not rest:
            remedy += f", or --devices and --nodes whose product is {fitting}"
        raise UserError(
            f"{path}: {TRAIN} {train} is not {MICRO} x {ACCUMULATION} x nodes x devices = {micro} x {accumulation} x "
            f"{processes} = {micro * accumulation * processes}; write {remedy}"
        )
    optimizer = content.get("optimizer")
    parameters = optimizer.get("params") if isinstance(optimizer, dict) else None
    return {
        "framework": "deepspeed",
        "batch_size": micro,
        "accumulation": accumulation,
        "gradients": "sum" if content.get("gradient_allreduce_op") == "sum" else "average",
        "learning_rate": _learning_rate(parameters.get("lr") if isinstance(parameters, dict) else None),
    }


def _divide(path: Path, train: int, other: Mapping[str, int], processes: int) -> int:
    ((name, value),) = other.items()
    if train % (value * processes) == 0:
        return train // (value * processes)
    below = train // (value * processes) * value * processes
    nearest = " or ".join(str(size) for size in (below, below + value * processes) if size)
    raise UserError(
        f"{path}: {TRAIN} {train} does not divide by {name} x nodes x devices = {value} x {processes} = "
        f"{value * processes}; write {TRAIN} {nearest}, or other --devices and --nodes"
    )


def _positive(path: Path, content: Mapping[str, Any], name: str) -> int:
    value = content[name]
    if value == "auto":
        raise UserError(
            f'{path}: {name} is "auto", which the HF Trainer or Accelerate fills in when it starts; give the '
            "TrainingArguments JSON instead, or write the number"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {name} is {value!r}; write a positive whole number")
    return value


def _learning_rate(value: object) -> float | None:
    """None for "auto" too: a learning rate is not needed."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
