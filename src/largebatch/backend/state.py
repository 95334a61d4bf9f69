"""What a checkpoint must hold of a strategy's state: which ranges of which vectors this process has, and writes.

Every parameter and every optimizer state of its shape is a vector (`storage.layout`). Under DDP each process holds
all of them whole; FSDP2 gives it rows, ZeRO parts of flat buffers: always a contiguous range.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from largebatch.config.optimizers import find_optimizer
from largebatch.errors import BackendMismatch
from largebatch.optim.layerwise import LayerPart
from largebatch.plan import RunPlan
from largebatch.storage.layout import WEIGHT, ParameterInfo
from largebatch.storage.tensors import DTYPE_NAMES


@dataclass(frozen=True)
class Piece:
    """A range of a vector that this process holds.

    Args:
        vector: "<kind>/<parameter's name>".
        start: First element of the range.
        tensor: The live state, of any shape: its elements in row-major order are the range.
        owned: The part that this process writes, as (start, stop) in the vector; of each element one process does.
    """

    vector: str
    start: int
    tensor: torch.Tensor
    owned: tuple[int, int]

    @property
    def stop(self) -> int:
        """Behind the last element of the range."""
        return self.start + self.tensor.numel()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the vector; a view where the tensor's memory is in row-major order."""
        return self.tensor.detach().reshape(-1)[start - self.start : stop - self.start]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set the elements from `start` on."""
        tensor, first = self.tensor.detach(), start - self.start
        flat = tensor.reshape(-1)
        flat[first : first + values.numel()].copy_(values)
        if not tensor.is_contiguous():
            # `reshape` has made a copy.
            tensor.copy_(flat.view(tensor.shape))


@dataclass(frozen=True)
class OptimizerSlot:
    """A tensor that torch's optimizer steps, and the parameters that it is, or the parts of them that are in it."""

    tensor: torch.Tensor
    parts: list[LayerPart]

    @property
    def names(self) -> list[str]:
        """The parameters."""
        return [part.name for part in self.parts]


@dataclass(frozen=True)
class EngineState:
    """The state of one process.

    Args:
        parameters: All parameters of the model, also those of which this process holds nothing; with the optimizer's
            single numbers where it holds something.
        pieces: What this process holds.
        buffers: The model's persistent buffers.
    """

    parameters: Mapping[str, ParameterInfo]
    pieces: list[Piece]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state, by their first name."""
    persistent = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in persistent}


def parameters_without_memory(model: nn.Module) -> list[nn.Parameter]:
    """Those that were built on the meta device."""
    return [parameter for parameter in model.parameters() if parameter.is_meta]


def materialize(parameter: nn.Parameter, device: torch.device) -> None:
    """Make memory for a whole parameter, with whatever it holds; it stays the same object for model and optimizer."""
    memory = torch.empty_like(parameter, device=device)
    whole = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]


def check_savable(model: nn.Module) -> None:
    """Refuse state that vectors and buffers do not hold.

    Raises:
        BackendMismatch: A module keeps state of its own form, or a tensor has a dtype that files do not.
    """
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise BackendMismatch(f"{name} is {tensor.dtype}, which a checkpoint cannot hold; make it one of {known}")
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise BackendMismatch(
                f"{name} ({type(module).__name__}) has get_extra_state, which a checkpoint does not hold; keep its "
                "state in buffers"
            )


def local_range(parameter: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """Of a parameter or a state of its shape: the part that this process holds, and the vector's element it starts at.

    Returns:
        The part, its start, and whether the other processes hold other parts.

    Raises:
        BackendMismatch: The part is no contiguous range, or is held by several processes.
    """
    if not isinstance(parameter, DTensor):
        return parameter.data, 0, False
    if any(not isinstance(placement, Shard) or placement.dim != 0 for placement in parameter.placements) or (
        len(parameter.placements) > 1
    ):
        placements = ", ".join(str(placement) for placement in parameter.placements)
        hint = "replicated over groups" if any(isinstance(p, Replicate) for p in parameter.placements) else placements
        raise BackendMismatch(f"a parameter is {hint}; checkpoints hold parameters sharded by rows over all processes")
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().data, offset[0] * math.prod(parameter.shape[1:]), True


def shares(sizes: Mapping[str, int], rank: int, world_size: int) -> Iterator[tuple[str, int, int]]:
    """What process `rank` writes of vectors that every process holds whole: an equal part of all their elements.

    Args:
        sizes: Elements of each vector.
        rank: This process.
        world_size: All processes.
    """
    total = sum(sizes.values())
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    position = 0
    for name, size in sizes.items():
        start, stop = max(first - position, 0), min(last - position, size)
        yield (name, start, stop) if start < stop else (name, 0, 0)
        position += size


def pieces_of(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> list[Piece]:
    """Pieces of torch's own parameters and states, whole or sharded by FSDP2, by their vectors' names."""
    held = {vector: local_range(tensor) for vector, tensor in tensors.items()}
    whole = {vector: part.numel() for vector, (part, _, is_sharded) in held.items() if not is_sharded}
    owned = {vector: (start, stop) for vector, start, stop in shares(whole, rank, world_size)}
    return [
        Piece(vector, start, part, owned.get(vector, (start, start + part.numel())))
        for vector, (part, start, _) in held.items()
        if part.numel()
    ]


def weight_vectors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters by their vectors' names."""
    return {f"{WEIGHT}/{name}": parameter for name, parameter in model.named_parameters()}


def split_state(
    state: Mapping[str, Any], like: torch.Tensor, owner: str, plan: RunPlan
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The optimizer's states of one tensor: those that are tensors, and single numbers; None is no state.

    Raises:
        BackendMismatch: One is not what the plan's optimizer declares.
    """
    declared = find_optimizer(plan.optimizer, plan.optimizer_owner).states(plan.optimizer_options, tuple(like.shape))
    if state and (unkept := declared.keys() - state.keys()):
        raise BackendMismatch(
            f"the optimizer keeps no state {min(unkept)!r} of {owner}, which its entry declares; correct `states` in "
            f"the entry of {plan.optimizer!r}"
        )
    vectors: dict[str, torch.Tensor] = {}
    scalars: dict[str, float] = {}
    for kind, value in state.items():
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if declared.get(kind) != shape or not isinstance(value, torch.Tensor | int | float):
            given = f"of shape {shape}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise BackendMismatch(
                f"the optimizer's state {kind!r} of {owner} is {given}, where its entry declares "
                f"{declared.get(kind, 'none')}; correct `states` in the entry of {plan.optimizer!r}"
            )
        if isinstance(value, torch.Tensor) and shape:
            vectors[kind] = value
        else:
            scalars[kind] = float(value)
    return vectors, scalars


def fresh_state(
    optimizer: Optimizer,
    tensors: Iterable[torch.Tensor],
    construct: Callable[[list[dict[str, Any]]], Optimizer],
) -> None:
    """Give the tensors that have none the state that the optimizer's first step makes, to be written over.

    Optimizers make their state in their first step; another one, which `construct` makes of parameter groups, makes it
    here, with a gradient and a learning rate of zero.
    """
    for tensor in tensors:
        if optimizer.state.get(tensor):
            continue
        group = next((g for g in optimizer.param_groups if any(p is tensor for p in g["params"])), None)
        options = dict(group if group is not None else optimizer.param_groups[0])
        options |= {"params": [tensor], "lr": 0.0}
        gradient, tensor.grad = tensor.grad, torch.zeros_like(tensor)
        scratch = construct([options])
        scratch.step()
        tensor.grad = gradient
        optimizer.state[tensor] = scratch.state[tensor]


def set_scalars(state: dict[str, Any], scalars: Mapping[str, float]) -> None:
    """Set the single numbers in an optimizer's state of one tensor, each in the form it has there."""
    for kind, number in scalars.items():
        current = state[kind]
        if isinstance(current, torch.Tensor):
            current.fill_(number)
        else:
            state[kind] = type(current)(number)
