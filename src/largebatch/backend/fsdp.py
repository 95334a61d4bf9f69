"""FSDP2 and HSDP."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import InitProcessGroupKwargs, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from largebatch.backend.accelerate_internals import rehearse_fsdp_on_cpu
from largebatch.backend.base import Update
from largebatch.backend.fsdp_units import fsdp_units, shape_of
from largebatch.backend.gathers import gather_in_bf16
from largebatch.backend.launch import SHARD_SIZE
from largebatch.backend.native import NativeBackend
from largebatch.backend.state import EngineState, parameters_without_memory
from largebatch.backend.torch_internals import (
    gathered_parameters,
    hide_gathers_from_modes,
    sharded_units,
    waits_for_all_reduce,
)
from largebatch.errors import BackendMismatch, LaunchError
from largebatch.estimate.memory import when_reduced


class FsdpBackend(NativeBackend):
    """FSDP2 over all processes or, with HSDP, over groups of them that are replicas of each other.

    Gradients are reduce-scattered with each micro-batch, or only with the last one of a step; until then each process
    keeps them whole. HSDP sums the shards over the replicas with the last micro-batch in either case.
    """

    _mesh: DeviceMesh  # of shape (processes that shard the model,) or, with replicas, (replicas, processes)

    def _accelerator_arguments(self, on_gpu: bool, group: InitProcessGroupKwargs) -> dict[str, Any]:
        if not on_gpu:
            rehearse_fsdp_on_cpu()
        if self.plan.compute.activation_checkpointing == "selective":
            hide_gathers_from_modes()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
        arguments: dict[str, Any] = {"fsdp_plugin": plugin, "kwargs_handlers": [group]}
        if self.launch.entry.replicates_shards:
            # Otherwise Accelerate reads that section of its config; `_form_mesh` forms the groups.
            arguments["parallelism_config"] = ParallelismConfig(dp_shard_size=self.launch.world_size)
        return arguments

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        shape = shape_of(model, self.plan)
        memory = None
        if self.device.type == "cuda":
            # That of the job's smallest GPU.
            memory = -self.all_max(-torch.cuda.get_device_properties(self.device).total_memory)()
        self.reduces = when_reduced(shape, self.launch.sharing, self.plan, memory)
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            groups.append([names[parameter] for parameter in group["params"]])
            # So that sharding frees their memory.
            group["params"] = []
        super()._wrap(model, optimizer)
        parameters = dict(model.named_parameters())
        for group, own in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in own]
        self._units = list(sharded_units(model))
        gather_in_bf16(model, {each.name for each in shape.parameters if each.in_bf16 and not each.stored_in_bf16})
        if (compiled := self._compiled) is not None:
            for region in compiled.regions:
                if any(isinstance(part, FSDPModule) for part in region.modules() if part is not region):
                    compiled.leave_out(region)

    def _materialize(self, model: nn.Module) -> None:
        """Shard the model, which Accelerate then takes as it is, and allocate rows that were built without memory."""
        self._mesh = self._form_mesh()
        for unit in fsdp_units(model):
            reshards = self.launch.reshards and not unit.gathered_once
            fully_shard(unit.modules, mesh=self._mesh, reshard_after_forward=reshards)
        if parameters_without_memory(model):
            # Through the modules, so that FSDP registers the change.
            model._apply(  # type: ignore[no-untyped-call]
                lambda tensor: torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor
            )

    def _form_mesh(self) -> DeviceMesh:
        """Form the groups of processes that shard the model.

        Raises:
            LaunchError: They differ in size, so the processes would wait for each other while forming them.
        """
        shard_size = self.launch.shard_size
        if shard_size is None:
            return init_device_mesh(self.device.type, (self.world_size,))
        if ranks := self.differing_ranks(shard_size):
            raise LaunchError(
                f"hsdp shards the model over groups of equal size, but it differs from rank 0's on rank {ranks}; by "
                f"default, a group is the processes of a node: set {SHARD_SIZE} to one number everywhere, or start as "
                "many on each node",
                everywhere=True,
            )
        shape = (self.world_size // shard_size, shard_size)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replica", "shard"))

    def mark_micro_step(self, is_last: bool) -> None:
        # Every backward pass keeps FSDP2's mark of a last one: otherwise FSDP2 would keep the order of its units from
        # one micro-batch to the next, and gather the tail one time too many.
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last or self.reduces == "each_micro_batch")
        # Whether the gradients reduced within a group are also summed over the replicas.
        self.model.set_requires_all_reduce(is_last)

    def _gradient_leaves(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return gathered_parameters(self._units)

    def clip_and_step(self, measure_norm: bool, max_norm: float | None = None) -> Update:
        # If the last micro-batch has not used a unit, FSDP2 would sum its gradients over the replicas in the next step.
        if any(map(waits_for_all_reduce, self._units)):
            raise BackendMismatch(
                "a part of the model got gradients from an earlier micro-batch of this step, but none from the last, "
                "with which hsdp sums gradients over its replicas; use the same parts in each micro-batch, or set "
                'compute.reduce_gradients to "last_micro_batch"'
            )
        return super().clip_and_step(measure_norm, max_norm)

    @property
    def _shard_group(self) -> torch.distributed.ProcessGroup:
        return self._mesh.get_group(self._mesh.ndim - 1)

    @property
    def _replica(self) -> tuple[int, int]:
        if self.launch.shard_size is not None:
            return self._mesh.get_local_rank(0), self._mesh.size(0)
        return 0, 1

    def engine_state(self) -> EngineState:
        # Gathered parameters are different objects from the sharded ones.
        self._reshard()
        return super().engine_state()

    def _exchange_averages(self) -> None:
        # What is gathered would keep the values from before.
        self._reshard()
        super()._exchange_averages()

    def _reshard(self) -> None:
        """Free the gathered parameters, such as those that the root keeps after an evaluation."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
