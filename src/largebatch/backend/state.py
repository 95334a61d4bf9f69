"""A strategy's state as a checkpoint stores it: which ranges of which vectors this process holds, and which it writes.

Every parameter and every optimizer state is a vector (`storage.layout`). Under DDP each process holds all vectors
whole; under FSDP2 and HSDP it holds rows, under ZeRO parts of flat buffers: always a contiguous range.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from largebatch.config.optimizers import GroupOptions
from largebatch.errors import BackendMismatch
from largebatch.optim.build import optimizer_over
from largebatch.optim.layerwise import local_part
from largebatch.optim.whole_layers import LayerPart
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


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state, by their first name."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


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
            known = ", ".join(map(str, DTYPE_NAMES))
            raise BackendMismatch(f"{name} is {tensor.dtype}, which checkpoints cannot store; make it one of {known}")
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise BackendMismatch(
                f"{name} ({type(module).__name__}) has get_extra_state, which checkpoints do not store; keep its "
                "state in buffers"
            )


def own_part(name: str, parameter: torch.Tensor) -> LayerPart:
    """This process's part of a parameter of torch: all of it or, under FSDP2, its rows."""
    start = 0
    if isinstance(parameter, DTensor):
        placements = parameter.placements
        assert placements in ((Shard(0),), (Replicate(), Shard(0)))
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
        start = offset[0] * math.prod(parameter.shape[1:])
    return LayerPart(name, start, 0, local_part(parameter).numel())


def piece_of(kind: str, tensor: torch.Tensor, part: LayerPart) -> Piece:
    """A part of a parameter, or of a state of its shape, in a tensor: all of that or, in a flat buffer, a range."""
    local = local_part(tensor).data
    if local.numel() != part.length:
        local = local[part.offset : part.offset + part.length]
    return Piece(f"{kind}/{part.name}", part.start, local, (part.start, part.start + part.length))


def share_writing(pieces: Sequence[Piece], place: int, number: int) -> list[Piece]:
    """Have each of the processes that hold these same pieces write an equal share of them, this one that of its place.

    Args:
        pieces: The pieces.
        place: The place of this process among them.
        number: The number of these processes.
    """
    total = sum(piece.tensor.numel() for piece in pieces)
    first = total * place // number
    last = total * (place + 1) // number
    shared = []
    before = 0
    for piece in pieces:
        begin = piece.start + max(first - before, 0)
        end = min(piece.start + last - before, piece.stop)
        before += piece.tensor.numel()
        shared.append(replace(piece, owned=(begin, end) if begin < end else (0, 0)))
    return shared


def create_state(optimizer: Optimizer, tensor: torch.Tensor, options: GroupOptions, plan: RunPlan) -> None:
    """Give a tensor without optimizer state the state that a first step creates, to be overwritten.

    A second optimizer of the same kind, with the options of the tensor's parameter group, makes that step, with a
    gradient and a learning rate of zero.
    """
    if optimizer.state.get(tensor):
        return
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
