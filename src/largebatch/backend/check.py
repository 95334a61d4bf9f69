"""Compares what a prepared engine would do with the plan; any difference refuses the run."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from largebatch.backend.base import Backend, Observed
from largebatch.backend.launch import Launch
from largebatch.errors import BackendMismatch
from largebatch.optim.build import build_optimizer
from largebatch.optim.groups import group_options, group_sizes
from largebatch.plan import RunPlan
from largebatch.storage.tensors import fingerprint
from largebatch.words import bulleted

# The dtype of weights, gradients and losses, by precision.
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def expect(plan: RunPlan, launch: Launch, optimizer: Optimizer) -> Observed:
    """The engine's required behavior, from the plan and from the optimizer as the recipe built it, before `prepare`."""
    expected: Observed = {
        "parameters per group": group_sizes(optimizer),
        "hyperparameters per group": group_options(optimizer),
        "master weights": {str(DTYPES[plan.precision])},
    }
    if launch.entry.engine != "FSDP":
        expected["strategy"] = launch.strategy
    if launch.deepspeed_config is not None:
        expected |= {
            "gradient accumulation inside the engine": 1,
            "micro-batch size in DeepSpeed": plan.micro_batch_size,
            "gradient clipping in DeepSpeed": plan.optimizer.clip_norm or 0.0,
            "learning-rate scheduler in DeepSpeed": None,
            "gradient reduction in DeepSpeed": "torch.float32",
            "autocast in DeepSpeed": plan.precision == "bf16",
        }
    return expected


def check_before(model: nn.Module, optimizer: Optimizer, backend: Backend) -> None:
    """Before `prepare`: check that model and optimizer, as the recipe built them, match the plan on every process.

    Every process must call this.

    Raises:
        BackendMismatch: The optimizer is of a different kind, has different hyperparameters, or does not have each
            trainable parameter once with its weight decay; model and plan differ on whether there are BatchNorm layers;
            the strategy cannot shard a parameter; or processes start from different weights.
    """
    problems = [
        *_optimizer_problems(model, optimizer, backend.plan),
        *_batch_norm_problems(model, backend.plan),
        *_single_number_problems(model, backend.launch),
    ]
    # Weights on the meta device are checked when they are set.
    tensors = (tensor for tensor in itertools.chain(model.parameters(), model.buffers()) if not tensor.is_meta)
    if differing := backend.differing_ranks(fingerprint(*tensors)):
        problems.append(
            f"the starting weights differ from rank 0's on rank {differing}; build the same model on all, "
            "right after run.load"
        )
    if problems:
        raise BackendMismatch(f"the recipe's model and optimizer do not match the plan:{bulleted(problems)}")


def _optimizer_problems(model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> Iterator[str]:
    remedy = "build it with largebatch.optim.build_optimizer(model, run.plan)"
    planned = build_optimizer(model, plan)
    if type(optimizer) is not type(planned):
        yield f"the optimizer is {type(optimizer).__name__}, the plan says {type(planned).__name__}; {remedy}"
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    given = _options_by_parameter(optimizer)
    expected = _options_by_parameter(planned)
    if given.keys() != expected.keys() or sum(len(group["params"]) for group in optimizer.param_groups) != len(given):
        missing = [names[parameter] for parameter in expected if parameter not in given]
        what = f"; missing: {', '.join(missing[:5])}" if missing else ""
        yield f"the optimizer does not contain each trainable parameter of the model exactly once{what}; {remedy}"
        return
    for option in group_options(planned)[0]:
        wrong = [parameter for parameter in expected if given[parameter][option] != expected[parameter][option]]
        if wrong:
            first = wrong[0]
            yield (
                f"the optimizer's {option} of {names[first]} is {given[first][option]}, the plan says "
                f"{expected[first][option]} ({len(wrong)} parameters differ); {remedy}"
            )


def _options_by_parameter(optimizer: Optimizer) -> dict[nn.Parameter, Mapping[str, Any]]:
    groups = zip(optimizer.param_groups, group_options(optimizer), strict=True)
    return {parameter: options for group, options in groups for parameter in group["params"]}


def _batch_norm_problems(model: nn.Module, plan: RunPlan) -> Iterator[str]:
    """Compare the model's layers with what the plan says about BatchNorm."""
    layers = {name or "the model": module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if bool(layers) != plan.uses_batch_norm:
        found = f"{next(iter(layers))} is a BatchNorm layer" if layers else "the model has no BatchNorm layer"
        yield (
            f"{found}, which decides whether micro_batch_size is part of the loss, but the plan says otherwise; set "
            f"uses_batch_norm to {bool(layers)} in the class of the config's model section, or change the model"
        )
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for name, layer in layers.items():
        if isinstance(layer, nn.SyncBatchNorm) or (plan.sync_batch_norm and type(layer) not in plain):
            yield (
                f"{name} is of class {type(layer).__name__}, but the plan has model.sync_batch_norm: "
                f"{str(plan.sync_batch_norm).lower()}; build torch's own BatchNorm1d, 2d or 3d, which true synchronizes"
            )
            return


def _single_number_problems(model: nn.Module, launch: Launch) -> Iterator[str]:
    """FSDP2 and DeepSpeed cannot shard parameters without dimensions."""
    if launch.entry.steps == "whole parameters":
        return
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            yield f"{name} is a single number, of shape (), which {launch.strategy} cannot shard; give it shape (1,)"


def check_backend(backend: Backend, expected: Observed) -> None:
    """After `prepare`: raise BackendMismatch if the engine would not do what `expect` said, naming each difference."""
    observed = backend.observe()
    differences = [
        f"{name}: the plan says {value}, the engine has {observed[name]}"
        for name, value in expected.items()
        if observed[name] != value
    ]
    if differences:
        what = f"the {backend.launch.strategy} engine would not do what the plan says"
        raise BackendMismatch(f"{what}:{bulleted(differences)}")
