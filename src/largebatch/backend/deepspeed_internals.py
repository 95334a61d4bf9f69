"""Uses of private interfaces of DeepSpeed, as read in 0.19.8: where its ZeRO optimizers keep their tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from largebatch.backend.torch_internals import hide_from_modes
from largebatch.optim.layerwise import LayerPart


def switch_off_shared_memory() -> None:
    """Keep DeepSpeed from compiling a collective over shared memory for CPUs.

    That takes about 40 s, and a run killed during it would leave a lock on which every later run waits forever.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def hide_gathers_from_modes() -> None:
    """Have ZeRO-3 gather and free weights outside of the modes that watch operations."""
    hide_from_modes(PartitionedParameterCoordinator, "fetch_sub_module", "release_sub_module")


@dataclass(frozen=True)
class _Partitions:
    """This process's flat buffers of fp32 master weights."""

    optimizer: Any  # DeepSpeed's optimizer of the stage
    rank: int


class PartitionedStates(_Partitions):
    """Stages 1 and 2: the weights of a parameter group, whole on every process, follow each other in a vector, which
    is padded and cut into equal parts, the buffers."""

    @property
    def masters(self) -> list[torch.Tensor]:
        """The buffers."""
        masters: list[torch.Tensor] = self.optimizer.single_partition_of_fp32_groups
        return masters

    @property
    def group_numbers(self) -> Iterable[int]:
        """The parameter group of each buffer. In stage 3, torch's groups have their buffers only during an update."""
        return range(len(self.masters))

    @property
    def group_sizes(self) -> list[int]:
        """The number of weights in each parameter group, over all processes."""
        return [sum(parameter.numel() for parameter in group) for group in self.optimizer.bit16_groups]

    def layer_parts(self, names: Mapping[nn.Parameter, str]) -> dict[torch.Tensor, list[LayerPart]]:
        """The parts of parameters in each buffer, by the parameters' names in the model."""
        layer_parts: dict[torch.Tensor, list[LayerPart]] = {}
        optimizer = self.optimizer
        for flat, group, offsets in zip(
            self.masters, optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True
        ):
            layer_parts[flat] = []
            first = self.rank * flat.numel()
            last = (self.rank + 1) * flat.numel()
            for parameter, begin in zip(group, offsets, strict=True):
                start = max(begin, first)
                stop = min(begin + parameter.numel(), last)
                if start < stop:
                    layer_parts[flat].append(LayerPart(names[parameter], start - begin, start - first, stop - start))
        return layer_parts

    def begin_restore(self) -> None:
        """Before weights are set: leave each process with its own parts only."""

    def end_restore(self) -> None:
        """After weights are set: make whole and master weights the same again."""
        for parts, master in zip(self.optimizer.parallel_partitioned_bit16_groups, self.masters, strict=True):
            master.data.copy_(parts[self.rank].data)

    def publish(self) -> None:
        """Set the model's weights to the buffers, of all processes."""
        self.optimizer.update_lp_params()


class PartitionedWeights(_Partitions):
    """Stage 3: each parameter is padded and cut into equal parts; a sub-group's buffer has this process's parts."""

    @property
    def masters(self) -> list[torch.Tensor]:
        masters: list[torch.Tensor] = self.optimizer.fp32_partitioned_groups_flat
        return masters

    @property
    def group_numbers(self) -> Iterable[int]:
        return [self.optimizer.sub_group_to_group_id[number] for number in range(len(self.masters))]

    @property
    def group_sizes(self) -> list[int]:
        sizes = [0] * len(self.optimizer.optimizer.param_groups)
        for number, parameters in zip(self.group_numbers, self.optimizer.fp16_groups, strict=True):
            sizes[number] += sum(parameter.ds_numel for parameter in parameters)
        return sizes

    def layer_parts(self, names: Mapping[nn.Parameter, str]) -> dict[torch.Tensor, list[LayerPart]]:
        layer_parts: dict[torch.Tensor, list[LayerPart]] = {}
        for flat, group in zip(self.masters, self.optimizer.fp16_groups, strict=True):
            layer_parts[flat] = []
            offset = 0
            for parameter in group:
                layer_parts[flat].append(self.own_part(parameter, names[parameter], offset))
                offset += parameter.ds_tensor.ds_numel
        return layer_parts

    def own_part(self, parameter: Any, name: str, offset: int = 0) -> LayerPart:
        """This process's part of a parameter, without padding, at `offset` of a buffer."""
        size = parameter.ds_tensor.ds_numel
        start = min(self.rank * size, parameter.ds_numel)
        return LayerPart(name, start, offset, min(size, parameter.ds_numel - start))

    def begin_restore(self) -> None:
        # Small parameters are kept whole between steps: partition them now, and gather them again at the end.
        self.optimizer._partition_all_parameters()

    def end_restore(self) -> None:
        optimizer = self.optimizer
        for whole, master in zip(optimizer.fp16_partitioned_groups_flat, self.masters, strict=True):
            whole.data.copy_(master.data)
        optimizer.invalidate_secondary_tensor()
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def publish(self) -> None:
        self.begin_restore()
        self.end_restore()


Partitions = PartitionedStates | PartitionedWeights
