"""Uses of private interfaces of FSDP2, DDP and the flight recorder, as read in torch 2.11 to 2.15."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

PreAllGather = Callable[..., tuple[tuple[torch.Tensor], None]]
PostAllGather = Callable[..., tuple[torch.Tensor, tuple[()]] | None]


def sharded_units(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own record of each unit of a sharded model."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    # Several modules that are one unit have one state.
    for state in dict.fromkeys(states):
        # torch 2.12 and older have one group.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from (group for group in groups if group)


def hide_gathers_from_modes() -> None:
    """Have FSDP2 gather and free the units inside a block outside of the modes that watch operations."""
    hide_from_modes(FSDPState, "_pre_forward", "_post_forward")


def hide_from_modes(owner: type, *methods: str) -> None:
    """Run methods of a class outside of the modes that watch operations.

    "selective" activation checkpointing refuses operations in a block's second run that its first run did not have.
    """
    for name in methods:
        setattr(owner, name, _disable_current_modes()(getattr(owner, name)))


def waits_for_all_reduce(unit: Any) -> bool:
    """Whether a unit has gradients that are reduced within its group, but not yet over the replicas."""
    return unit._partial_reduce_output is not None


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's own record of each parameter of a sharded model, with the parameter's name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in sharded_units(model):
        for shard in unit.fsdp_params:
            yield names[shard.sharded_param], shard


def gathered_parameters(units: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of units that were gathered at least once: the shard, and the tensor that modules use."""
    for unit in units:
        for shard in unit.fsdp_params:
            if hasattr(shard, "_unsharded_param"):
                yield shard.sharded_param, shard._unsharded_param


def padded_rows(shard: Any) -> torch.Tensor:
    """This process's rows of a parameter, and those that pad them to the size of other processes' shards."""
    rows: torch.Tensor = shard._sharded_param_data.view(shard.padded_sharded_param_size)
    return rows


def set_all_gather(shard: Any, before: PreAllGather, after: PostAllGather) -> None:
    """Have FSDP2 gather a parameter by its "all-gather extensions" (torch/distributed/fsdp/_fully_shard).

    FSDP2 calls these two methods on shards that have them. It looks for them on the whole tensors when it shards a
    module, so it has to look again.
    """
    local = shard.sharded_param._local_tensor
    local.fsdp_pre_all_gather = before
    local.fsdp_post_all_gather = after
    shard._init_extensions()


def settle_buckets(model: DistributedDataParallel, backward: Callable[[], None]) -> None:
    """Let DDP assign gradients to its buckets in the order of a backward pass, as after the first one of training."""
    reducer = model.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    backward()
    reducer._rebuild_buckets()


def recorded_collectives() -> bytes:
    """The dump of torch's flight recorder of NCCL, for `torchfrtrace`; AttributeError in builds of torch without NCCL.

    `torchfrtrace` of torch 2.13 cannot read what is recorded of gloo.
    """
    dump: bytes = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
    return dump
