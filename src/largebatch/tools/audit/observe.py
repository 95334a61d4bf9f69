"""Calls an audited function in one process of a job, and notes what its optimizers get."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from largebatch.errors import UserError
from largebatch.storage.tensors import fingerprint

Gradients = dict[str, np.ndarray]
"""By parameter, whole and in fp64."""

CONTRACT = "audit(indices, micro_batch_size, accumulation)"
# Of torch.nn.functional, which begin with the input and the probability.
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# What wrappers put before a parameter's name.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass
class Step:
    """What the optimizers get in a step."""

    rates: list[float] = field(default_factory=list)  # the learning rate of each parameter group
    gradients: Gradients = field(default_factory=dict)  # as the optimizers get them
    unclipped: Gradients = field(default_factory=dict)  # the same without clipping


@dataclass
class Observed:
    """One process's part of a call of the audited function."""

    steps: list[Step]
    buffers: Mapping[str, str]  # a digest of each one at the end
    dropout: str  # a digest of the random state where the model would drop something first; "" without dropout
    unused: Sequence[str]  # trainable parameters without a gradient


def observe(
    file: Path, function: str, precision: str, indices: Sequence[int], micro_batch_size: int, accumulation: int
) -> Observed:
    """Call the function of a file in this process, on the CPU, over gloo and without dropout.

    Args:
        file: The user's Python file.
        function: The name of its function, which is `CONTRACT`.
        precision: The name of torch's default dtype.
        indices: The samples to train on, once.
        micro_batch_size: Samples of a process in a backward pass.
        accumulation: Backward passes of a step.

    Raises:
        UserError: There is no such function, or it does not return its model.
    """
    watch = _Watch()
    torch.set_default_dtype(getattr(torch, precision))
    # Each process its own, as without a seed; the audited code may set another.
    torch.manual_seed(int(os.environ["RANK"]))
    model = _function_in(file, function)(list(indices), micro_batch_size, accumulation)
    return watch.result(model)


def _function_in(file: Path, name: str) -> Callable[[list[int], int, int], Any]:
    sys.path.insert(0, str(file.parent))
    sys.argv = [str(file)]
    # Not "__main__": what a script does under that name is not what is audited.
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file.name} is not a Python file")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{file.name} has no function {name}; define {CONTRACT}")
    return function  # type: ignore[no-any-return]


class _Watch:
    """Notes everything that optimizers get in this process from now on."""

    def __init__(self) -> None:
        # Parameters have no names yet.
        self.steps: list[Step] = []
        self.stepped: list[Optimizer] = []  # in the latest step
        self.clipped: dict[Any, np.ndarray] = {}  # gradients before they were clipped
        self.in_engine = False
        self.dropout = ""
        for name in DROPOUTS:
            setattr(nn.functional, name, self._no_dropout)
        nn.functional.scaled_dot_product_attention = self._attention_without_dropout(
            nn.functional.scaled_dot_product_attention
        )
        nn.utils.clip_grad_norm_ = self._observed_clipping(nn.utils.clip_grad_norm_)
        torch.distributed.init_process_group = _over_gloo(torch.distributed.init_process_group)
        register_optimizer_step_pre_hook(self._before_step)
        if "deepspeed" in sys.modules:
            engine = sys.modules["deepspeed"].DeepSpeedEngine
            engine.step = self._observed_engine_step(engine.step)

    def result(self, model: Any) -> Observed:
        """What was noted, with the model's names for its parameters."""
        parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        if not parameters:
            raise UserError(f"it returned {type(model).__name__} without parameters; return the model that was trained")
        names: dict[Any, str] = {each: _unwrapped(name) for name, each in parameters.items()}
        for step in self.steps:
            if not step.gradients.keys() <= names.keys():
                raise UserError(
                    "an optimizer steps parameters that the returned model does not have; make the optimizer after "
                    "the model is wrapped, and return the wrapped model"
                )
            step.gradients, step.unclipped = (
                {names[each]: value for each, value in found.items()} for found in (step.gradients, step.unclipped)
            )
        used = self.steps[0].gradients.keys() if self.steps else set()
        return Observed(
            self.steps,
            {_unwrapped(name): fingerprint(buffer) for name, buffer in model.named_buffers()},
            self.dropout,
            [name for each, name in names.items() if each.requires_grad and name not in used],
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A closure has the backward pass.
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        loss = closure() if closure else None
        if not self.in_engine:
            self._note(optimizer, gradients_of(each for group in optimizer.param_groups for each in group["params"]))
        return (args[:1], {"closure": lambda: loss}) if closure else None

    def _note(self, optimizer: Any, gradients: dict[Any, np.ndarray]) -> None:
        # Several optimizers of a model, one after another, make one step.
        if not self.steps or optimizer in self.stepped:
            self.steps.append(Step())
            self.stepped.clear()
        self.stepped.append(optimizer)
        step = self.steps[-1]
        step.rates += [float(group["lr"]) for group in optimizer.param_groups]
        step.gradients |= gradients
        # What was clipped for the step's first optimizer may be what the next one gets.
        step.unclipped = gradients | step.unclipped | self.clipped
        self.clipped = {}

    def _observed_engine_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's own optimizer steps pieces of parameters, which are not noted."""
        from deepspeed.utils import safe_get_full_grad

        @wraps(step)
        def observed(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.in_engine = True
            if engine.is_gradient_accumulation_boundary():
                found = {each: safe_get_full_grad(each) for each in engine.module.parameters()}
                gradients = {each: whole(one) for each, one in found.items() if one is not None}
                self._note(engine.optimizer, gradients)
            return step(engine, *args, **kwargs)

        return observed

    def _observed_clipping(self, clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(clip)
        def observed(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.clipped |= gradients_of(parameters)
            return clip(parameters, *args, **kwargs)

        return observed

    def _no_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
        if p and training:
            self.dropout = self.dropout or fingerprint(torch.get_rng_state())
        return input

    def _attention_without_dropout(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(attend)
        def observed(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            self._no_dropout(query, dropout_p)
            return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

        return observed


def whole(tensor: Tensor) -> np.ndarray:
    """A tensor, gathered if it is sharded, in fp64."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().to("cpu", torch.float64).numpy().copy()


def gradients_of(parameters: Iterable[Tensor]) -> dict[Any, np.ndarray]:
    """The gradients of those that have one."""
    return {each: whole(each.grad) for each in parameters if each.grad is not None}


def _over_gloo(join: Callable[..., None]) -> Callable[..., None]:
    @wraps(join)
    def joined(*_: object, **__: object) -> None:
        join("gloo")
        # A process that needs no other might end before the others have met it.
        torch.distributed.barrier()

    return joined


def _unwrapped(name: str) -> str:
    for prefix in WRAPPERS:
        name = name.replace(prefix, "")
    return name
