"""Calls an audited function in one process of a job, and notes what its optimizers get."""

import math
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from largebatch.errors import UserError
from largebatch.storage.tensors import fingerprint
from largebatch.task_folders import package_of

Vector = np.ndarray
"""The elements of a parameter, or of all parameters of a model one after another, in fp64; complex ones as two."""
Vectors = dict[Tensor, Vector]
"""Gradients or values by parameter, each whole."""

OfParameter = Callable[[Tensor], Tensor | None]

RATES = "the learning rates"
CONTRACT = "audit(indices, micro_batch_size, accumulation)"
# What wrappers put before a parameter's name.
WRAPPERS = r"\b(module|_orig_mod|_checkpoint_wrapped_module)\."


@dataclass
class Observed:
    """One process's part of a call of the audited function."""

    gradients: Sequence[Vector]  # of all parameters in each step, as the optimizers get them
    unclipped: Sequence[Vector]  # the same without clipping
    groups: Sequence[Mapping[str, Any]]  # the numbers of each parameter group at the first step; `RATES` of all steps
    num_clips: int  # how many times a parameter's gradient was clipped for the first step
    start: Vector  # of the parameters that are trained, before their first step; others are 0
    update: Vector  # of all parameters, by all steps
    dtype: torch.dtype  # the least precise one of a parameter that is trained, or of the parts of a complex one
    parts: Mapping[str, slice]  # the place of each parameter in a gradient
    unused: Sequence[str]  # trainable parameters without a gradient
    has_batch_norm: bool
    buffers: str  # a digest of all of them at the end
    dropout: str  # a digest of the random state where the model would drop something first; "" without dropout

    @property
    def gradient(self) -> Vector:
        """That of the first step, without clipping."""
        return self.unclipped[0]


def observe(file: Path, function: str, precision: str, *arguments: Any) -> Observed:
    """Call the function of a file in this process, on the CPU, over gloo and without dropout.

    Args:
        file: The user's Python file.
        function: The name of its function, which is `CONTRACT`.
        precision: The name of torch's default dtype.
        arguments: What it is called with.

    Raises:
        UserError: There is no such function, or it does not return its model.
    """
    watch = _Watch()
    torch.set_default_dtype(getattr(torch, precision))
    # Compiled code draws dropout's masks by itself.
    torch.compiler.set_stance("force_eager")
    distributed.init_process_group("gloo")
    # A process that needs no other might end before the others have met it.
    distributed.barrier()
    distributed.init_process_group = lambda *_, **__: None
    # Each process its own, as without a seed; the audited code may set another.
    torch.manual_seed(distributed.get_rank())
    sys.path.insert(0, str(file.parent))
    sys.argv = [str(file)]
    # Loader processes start as they do outside of the audit.
    multiprocessing.set_start_method(None, force=True)
    try:
        called = getattr(_imported(file), function, None)
        if not callable(called):
            raise UserError(f"{file.name} has no function {function}; define {CONTRACT}")
        if watch.steps:
            raise UserError(f'{file.name} trains when it is imported; do that below if __name__ == "__main__"')
        return watch.result(called(*arguments))
    except SystemExit as end:
        # As argparse ends a script that lacks some.
        if end.code == 2:
            raise UserError("it called exit(2); it gets no arguments: give those that it needs a default") from end
        raise


def _imported(file: Path) -> ModuleType:
    """A script as a process of `multiprocessing` imports it again, so that processes that it starts find its classes.

    Its name is not "__main__": what a script does under that name is not what is audited.
    """
    module = ModuleType("__mp_main__")
    module.__file__ = str(file)
    module.__package__ = package_of(file.parent)
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    SourceFileLoader(module.__name__, str(file)).exec_module(module)
    return module


class _Step(NamedTuple):
    """One step of all optimizers of a model."""

    rates: dict[Any, list[float]]  # the learning rate of each parameter group, by optimizer
    gradients: Vectors
    unclipped: Vectors  # the gradients before they were clipped


class _Watch:
    """Notes everything that optimizers get in this process from now on."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.clipped: Vectors = {}  # gradients before they were clipped
        self.clips: Counter[Tensor] = Counter()  # until the first step
        self.settings: list[dict[str, Any]] = []
        self.initial: Vectors = {}  # parameters before their first step
        self.dropout = ""
        self.gradient_of: OfParameter = attrgetter("grad")
        self.value_of: OfParameter = Tensor.detach
        self.kernels = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self.kernels.impl("bernoulli_.float", self._mean_instead_of_drawing, "CPU")  # type: ignore[no-untyped-call]
        self.hook = register_optimizer_step_pre_hook(self._before_step)
        self._watch_clipping()
        if "deepspeed" in sys.modules:
            self._watch_deepspeed()

    def result(self, model: Any) -> Observed:
        """What was noted, with the model's names for its parameters."""
        named = model.named_parameters() if isinstance(model, nn.Module) else []
        names = {each: re.sub(WRAPPERS, "", name) for name, each in named}
        if not names:
            raise UserError(f"it returned {type(model).__name__} without parameters; return the model that was trained")
        used = {each for step in self.steps for each in step.gradients}
        if not used <= names.keys():
            raise UserError(
                "an optimizer steps parameters that the returned model does not have; make the optimizer after the "
                "model is wrapped, and return the wrapped model, or several that are trained in an nn.ModuleList"
            )
        # ZeRO-3 leaves none of a parameter's elements in place.
        zeros = {each: np.zeros(getattr(each, "ds_numel", each.numel()) * (1 + each.is_complex())) for each in names}
        ends = np.cumsum([each.size for each in zeros.values()])

        def vector(found: Vectors) -> Vector:
            return np.concatenate(list((zeros | found).values()))

        rates_by_step = [chain.from_iterable(step.rates.values()) for step in self.steps]
        rates = zip(*rates_by_step, strict=False)
        dtypes = {each.dtype.to_real() for each in used}
        return Observed(
            gradients=[vector(step.gradients) for step in self.steps],
            unclipped=[vector(step.unclipped) for step in self.steps],
            groups=[{**settings, RATES: each} for settings, each in zip(self.settings, rates, strict=False)],
            num_clips=max(self.clips.values(), default=0),
            start=vector({each: self.initial[each] for each in used}),
            update=vector(_whole(self.initial, self.value_of)) - vector(self.initial),
            dtype=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64),
            parts=dict(zip(names.values(), map(slice, [0, *ends], ends), strict=True)),
            unused=[name for each, name in names.items() if each.requires_grad and each not in used],
            has_batch_norm=any(isinstance(each, _BatchNorm) and each.training for each in model.modules()),
            buffers=fingerprint(*model.buffers()),
            dropout=self.dropout,
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # It has the backward pass.
        closure = kwargs.get("closure", *args[1:2])
        loss = closure() if closure else None
        self._note(optimizer, [each for group in optimizer.param_groups for each in group["params"]])
        return (args[:1], {"closure": lambda: loss}) if closure else None

    def _watch_clipping(self) -> None:
        # All functions that clip call it, also those that other modules have imported. It has a public name, too.
        clip = clip_grad._clip_grads_with_norm_

        def noted(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
            self.clipped |= _whole(parameters, self.gradient_of)
            # Without a limit, it only tells the norm.
            if not self.steps and max_norm < math.inf:
                self.clips.update({*parameters})
            clip(parameters, max_norm, *args, **kwargs)

        clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = noted

    def _watch_deepspeed(self) -> None:
        from deepspeed import DeepSpeedEngine
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        step = DeepSpeedEngine.step

        def noted(engine: Any, *args: Any, **kwargs: Any) -> None:
            # Its own optimizer steps pieces of parameters.
            self.hook.remove()
            self.gradient_of = safe_get_full_grad
            if engine.zero_optimization_partition_weights():
                self.value_of = safe_get_full_fp32_param
            if engine.is_gradient_accumulation_boundary():
                self._note(engine.optimizer, [*engine.module.parameters()])
            step(engine, *args, **kwargs)

        DeepSpeedEngine.step = noted

    def _note(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        # Several optimizers of a model, one after another, make one step.
        if not self.steps or optimizer in self.steps[-1].rates:
            self.steps.append(_Step({}, {}, {}))
        step = self.steps[-1]
        self.initial = _whole(parameters, self.value_of) | self.initial
        if len(self.steps) == 1:
            self.settings += map(_settings, optimizer.param_groups)
        step.rates[optimizer] = [float(group["lr"]) for group in optimizer.param_groups]
        found = _whole(parameters, self.gradient_of)
        step.gradients.update(found)
        # What was clipped for the step's first optimizer may be what the next one gets.
        step.unclipped.update(found | step.unclipped | self.clipped)
        self.clipped = {}

    def _mean_instead_of_drawing(self, mask: Tensor, p: float = 0.5, **_: Any) -> Tensor:
        """A mask of dropout, whose layers divide by the probability."""
        self.dropout = self.dropout or fingerprint(torch.get_rng_state())
        return mask.fill_(p)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group that are no rates, by name; whole ones may be ranks or counts."""
    found = {}
    for name, value in group.items():
        parts = value if isinstance(value, tuple) else [value]
        if "lr" not in name and all(isinstance(each, float) for each in parts):
            found[name] = value
    return found


def _whole(parameters: Iterable[Tensor], of: OfParameter) -> Vectors:
    """A tensor of each parameter, gathered if it is sharded; none without one."""
    found = {}
    for each in parameters:
        tensor = of(each)
        if tensor is not None:
            if hasattr(tensor, "full_tensor"):
                tensor = tensor.full_tensor()
            precise = tensor.to(torch.promote_types(tensor.dtype, torch.float64))
            # Gradients of embeddings may be sparse.
            found[each] = precise.to_dense().numpy(force=True).flatten().view(np.float64)
    return found
