"""A strategy's state as a checkpoint stores it: which ranges of which vectors this process holds, and which it writes.

Every parameter and every optimizer state is a vector (`storage.layout`). Under DDP each process holds all vectors
whole; under FSDP2 and HSDP it holds rows, under ZeRO parts of flat buffers: always a contiguous range.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from largebatch.config.optimizers import GroupOptions
from largebatch.errors import BackendMismatch
from largebatch.optim.build import optimizer_over
from largebatch.plan import RunPlan
from largebatch.storage.layout import ParameterInfo
from largebatch.storage.tensors import DTYPE_NAMES


@dataclass(frozen=True)
class Piece:
    """A range of a vector that this process holds."""

    vector: str  # "<kind>/<parameter's name>"
    start: int  # first element of the range
    tensor: torch.Tensor  # the live state, of any shape; its elements in row-major order are the range
    owned: tuple[int, int]  # what this process writes, as (start, stop) in the vector; one process writes each element

    @property
    def stop(self) -> int:
        """The end of the range, exclusive."""
        return self.start + self.tensor.numel()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the vector; a view if the tensor's memory is in row-major order."""
        return self.tensor.detach().reshape(-1)[start - self.start : stop - self.start]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set the elements of the vector from `start` on."""
        tensor = self.tensor.detach()
        first = start - self.start
        flat = tensor.reshape(-1)
        flat[first : first + values.numel()].copy_(values)
        if not tensor.is_contiguous():
            # `reshape` has made a copy.
            tensor.copy_(flat.view(tensor.shape))


@dataclass(frozen=True)
class EngineState:
    """The state of one process."""

    # All parameters of the model. Those of which this process holds any part have the optimizer's scalar states.
    parameters: Mapping[str, ParameterInfo]
    pieces: list[Piece]  # what this process holds
    buffers: Mapping[str, torch.Tensor]  # the model's persistent buffers
    kept: dict[str, Any] = field(default_factory=dict)  # states of the task's own, as JSON


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
    """The parameters that were built on the meta device."""
    return [parameter for parameter in model.parameters() if parameter.is_meta]


def materialize(parameter: nn.Parameter, device: torch.device) -> None:
    """Allocate uninitialized memory for a whole parameter, which stays the same object for model and optimizer."""
    whole = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]


def check_savable(model: nn.Module) -> None:
    """Raise BackendMismatch if a module has state besides parameters and buffers, or a dtype that files do not have."""
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise BackendMismatch(f"{name} is {tensor.dtype}, which checkpoints cannot store; make it one of {known}")
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise BackendMismatch(
                f"{name} ({type(module).__name__}) has get_extra_state, which checkpoints do not store; keep its "
                "state in buffers"
            )


class Holders(NamedTuple):
    """The processes that hold the same part of a parameter, and this one's place among them."""

    place: int
    number: int


def local_range(parameter: torch.Tensor) -> tuple[torch.Tensor, int, Holders | None]:
    """The part of a parameter, or of a state of its shape, that this process holds.

    Returns:
        The part, its first element in the whole vector, and who holds it; None stands for all processes.
    """
    if not isinstance(parameter, DTensor):
        return parameter.data, 0, None
    placements = parameter.placements
    mesh = parameter.device_mesh
    assert placements in ((Shard(0),), (Replicate(), Shard(0)))
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    holders = Holders(mesh.get_local_rank(0), mesh.size(0)) if len(placements) > 1 else Holders(0, 1)
    return parameter.to_local().data, offset[0] * math.prod(parameter.shape[1:]), holders


def pieces_of(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> list[Piece]:
    """Pieces of torch's own parameters and states, by vector name: whole, or sharded by FSDP2.

    The processes that hold the same parts write an equal share of them each.
    """
    everyone = Holders(rank, world_size)
    held = {vector: local_range(tensor) for vector, tensor in tensors.items()}
    totals: Counter[Holders] = Counter()
    for part, _, holders in held.values():
        totals[holders or everyone] += part.numel()
    before: Counter[Holders] = Counter()
    pieces = []
    for vector, (part, start, found) in held.items():
        holders = found or everyone
        size = part.numel()
        # The share of these elements that this process writes.
        first, last = (totals[holders] * place // holders.number for place in (holders.place, holders.place + 1))
        begin = max(first - before[holders], 0)
        end = min(last - before[holders], size)
        before[holders] += size
        if size:
            owned = (start + begin, start + end) if begin < end else (0, 0)
            pieces.append(Piece(vector, start, part, owned))
    return pieces


def fresh_state(optimizer: Optimizer, groups: Mapping[torch.Tensor, GroupOptions], plan: RunPlan) -> None:
    """Give each tensor without optimizer state the state that a first step creates, to be overwritten.

    A second optimizer of the same kind, with the options of the tensor's parameter group, makes that step, with a
    gradient and a learning rate of zero.
    """
    for tensor, options in groups.items():
        if optimizer.state.get(tensor):
            continue
        gradient = tensor.grad
        tensor.grad = torch.zeros_like(tensor)
        scratch = optimizer_over([{**options, "params": [tensor], "lr": 0.0}], plan)
        scratch.step()
        tensor.grad = gradient
        optimizer.state[tensor] = scratch.state[tensor]


def set_scalars(state: dict[str, Any], scalars: Mapping[str, float]) -> None:
    """Set the scalars in an optimizer's state for one tensor, keeping the type of each; BackendMismatch for others."""
    for kind, number in scalars.items():
        if kind not in state:
            raise BackendMismatch(
                f"the checkpoint has {kind!r} for a parameter, which this optimizer does not keep; resume from another "
                "checkpoint"
            )
        current = state[kind]
        if isinstance(current, torch.Tensor):
            current.fill_(number)
        else:
            state[kind] = type(current)(number)
