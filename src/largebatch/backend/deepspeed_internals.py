"""Uses of private interfaces of DeepSpeed, as read in 0.19.8: where its ZeRO optimizers keep their tensors."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.zero import linear as zero_linear
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn
from torch.nn.functional import linear

from largebatch.backend.torch_internals import hide_from_modes
from largebatch.errors import UserError
from largebatch.optim.whole_layers import LayerPart


def switch_off_shared_memory() -> None:
    """Keep DeepSpeed from compiling a collective over shared memory for CPUs.

    That takes about 40 s, and a run killed during it would leave a lock on which every later run waits forever.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def hide_gathers_from_modes() -> None:
    """Have ZeRO-3 gather and free weights outside of the modes that watch operations."""
    hide_from_modes(coordinator.PartitionedParameterCoordinator, "fetch_sub_module", "release_sub_module")


def add_biases_before_rounding() -> None:
    """Have ZeRO-3's linear layers compute what torch's do: in bf16, they round the product before they add the bias."""

    def forward(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(inputs, weight, bias)

    zero_linear.LinearFunctionForZeroStage3.forward = staticmethod(forward)


def share_compiled_code() -> None:
    """Have compiled blocks of ZeRO-3 depend on no number of a parameter: torch before 2.13 would compile each anew."""

    def has_status(parameter: object) -> bool:
        return hasattr(parameter, "ds_status")

    zero_linear.is_zero_param = has_status


def refuse_replaced_weights() -> None:
    """Have ZeRO-3 raise UserError when a module is called with other tensors in place of its weights."""
    parameters_of = coordinator.iter_params

    def own_parameters(module: nn.Module, recurse: bool = False) -> Iterator[nn.Parameter]:
        for parameter in parameters_of(module, recurse):
            if not is_zero_param(parameter):
                raise UserError(
                    "a module was called with other tensors in place of its weights, such as by "
                    "torch.func.functional_call, which zero3 cannot gather; train under another strategy"
                )
            yield parameter

    coordinator.iter_params = own_parameters


@contextmanager
def steps_up_to(max_norm: float, optimizer: Any, all_max: Callable[[int], Callable[[], int]]) -> Iterator[list[float]]:
    """In the block, a ZeRO optimizer skips a step whose gradient's norm is larger, as it skips one that is not finite.

    The list gets such a norm; the engine itself would report it as infinite. `all_max` is `Processes.all_max`: devices
    of different kinds may round the same norm differently.
    """
    module = sys.modules[type(optimizer).__module__]
    is_invalid = module.is_invalid_grad_norm
    refused: list[float] = []
    is_large: bool | None = None

    def is_refused(norm: torch.Tensor | float) -> bool:
        nonlocal is_large
        if is_invalid(norm):
            return True
        # The engine asks again when it clips.
        if is_large is None:
            is_large = bool(all_max(int(norm > max_norm))())
            if is_large:
                refused.append(float(norm))
        return is_large

    module.is_invalid_grad_norm = is_refused  # type: ignore[attr-defined]
    try:
        yield refused
    finally:
        module.is_invalid_grad_norm = is_invalid  # type: ignore[attr-defined]


class Buffer(NamedTuple):
    """A flat buffer of fp32 master weights that DeepSpeed's optimizer steps on this process."""

    weights: torch.Tensor
    group: int  # number of the parameter group
    parts: list[LayerPart]  # which parts of parameters are in it; the rest is padding


def buffers_of_states(optimizer: Any, rank: int, names: Mapping[nn.Parameter, str]) -> list[Buffer]:
    """Stages 1 and 2: the weights of a parameter group, whole on every process, follow each other in a vector, which is
    padded and cut into equal parts, the buffers.

    Args:
        optimizer: DeepSpeed's optimizer.
        rank: Rank of this process.
        names: The parameters' names in the model.
    """
    buffers = []
    for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        first = rank * flat.numel()
        last = first + flat.numel()
        parts = []
        group = zip(
            optimizer.round_robin_bit16_groups[number], optimizer.round_robin_bit16_offsets[number], strict=True
        )
        for parameter, begin in group:
            start = max(begin, first)
            stop = min(begin + parameter.numel(), last)
            if start < stop:
                parts.append(LayerPart(names[parameter], start - begin, start - first, stop - start))
        buffers.append(Buffer(flat, number, parts))
    return buffers


def buffers_of_weights(optimizer: Any, rank: int, names: Mapping[nn.Parameter, str]) -> list[Buffer]:
    """Stage 3: each parameter is padded and cut into equal parts; a sub-group's buffer has this process's parts.

    The arguments are those of `buffers_of_states`.
    """
    buffers = []
    for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        parts = []
        offset = 0
        for parameter in optimizer.fp16_groups[number]:
            parts.append(part_of_weight(parameter, rank, names[parameter], offset))
            offset += parameter.ds_tensor.ds_numel
        # torch's groups have their buffers only during an update.
        buffers.append(Buffer(flat, optimizer.sub_group_to_group_id[number], parts))
    return buffers


def part_of_weight(parameter: Any, rank: int, name: str, offset: int = 0) -> LayerPart:
    """A process's part of a parameter in stage 3, without padding, at `offset` of a buffer."""
    size = parameter.ds_tensor.ds_numel
    start = min(rank * size, parameter.ds_numel)
    return LayerPart(name, start, offset, min(size, parameter.ds_numel - start))


def copy_to_masters(optimizer: Any, rank: int) -> None:
    """Stages 1 and 2: set the master weights to the whole weights."""
    masters = optimizer.single_partition_of_fp32_groups
    for parts, master in zip(optimizer.parallel_partitioned_bit16_groups, masters, strict=True):
        master.data.copy_(parts[rank].data)


def publish_masters(optimizer: Any) -> None:
    """Stages 1 and 2: set the whole weights to the master weights of all processes."""
    optimizer.update_lp_params()


def partition_weights(optimizer: Any) -> None:
    """Stage 3: leave each process with its own parts, also of small parameters, which are whole between steps."""
    optimizer._partition_all_parameters()


def copy_from_masters(optimizer: Any) -> None:
    """Stage 3: set the weights to the master weights, and gather small parameters again."""
    masters = optimizer.fp32_partitioned_groups_flat
    for parts, master in zip(optimizer.fp16_partitioned_groups_flat, masters, strict=True):
        parts.data.copy_(master.data)
    optimizer.invalidate_secondary_tensor()
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
