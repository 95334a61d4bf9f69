"""FSDP2 and HSDP."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from largebatch.backend.accelerate_internals import rehearse_fsdp_on_cpu
from largebatch.backend.base import Observed, Update
from largebatch.backend.exchange import all_gather
from largebatch.backend.fsdp_units import gather_once, shape_of, shardable_parts
from largebatch.backend.gathers import gather_in_bf16
from largebatch.backend.launch import SHARD_SIZE, Launch
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
from largebatch.plan import RunPlan


class FsdpBackend(NativeBackend):
    """FSDP2 over all processes or, with HSDP, over groups of them that are replicas of each other.

    Gradients are reduce-scattered with each micro-batch, or only with the last one of a step; until then each process
    keeps them whole. HSDP sums the shards over the replicas with the last micro-batch in either case.
    """

    _mesh: DeviceMesh  # of shape (processes that shard the model,) or, with replicas, (replicas, processes)

    @staticmethod
    def accelerate_arguments(
        launch: Launch, plan: RunPlan, on_gpu: bool, group: InitProcessGroupKwargs
    ) -> dict[str, Any]:
        if not on_gpu:
            rehearse_fsdp_on_cpu()
        if plan.compute.activation_checkpointing == "selective":
            hide_gathers_from_modes()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        arguments = {"fsdp_plugin": plugin, "kwargs_handlers": [group]}
        if shard_size := launch.shard_size:
            _agree_on_shards(shard_size, group)
            replicas = launch.world_size // shard_size
            arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shard_size)
        return arguments

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        shape = shape_of(model, self.plan)
        memory = self._smallest_gpu()
        self.reduces = when_reduced(shape, self.launch.sharing, self.plan, memory)
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        with shardable_parts(model):
            prepared = super()._wrap(model, optimizer)
        if len(list(model.named_parameters())) != len(names):
            raise BackendMismatch(
                "FSDP has split a parameter that modules share into several, which would be trained separately; remove "
                "fsdp_transformer_layer_cls_to_wrap from the Accelerate config, or name modules that share no parameter"
            )
        sharded = next(model.parameters())
        assert isinstance(sharded, DTensor)
        self._mesh = sharded.device_mesh
        if parameters_without_memory(model):
            self._materialize_shards(groups)
        self._units = list(sharded_units(model))
        gather_once(model)
        gather_in_bf16(model, {each.name for each in shape.parameters if each.in_bf16 and not each.stored_in_bf16})
        if (compiled := self._compiled) is not None:
            for region in compiled.regions:
                if any(isinstance(part, FSDPModule) for part in region.modules() if part is not region):
                    compiled.leave_out(region, self.launch.strategy, self.plan.compute.compile)
        return prepared

    def _materialize(self, model: nn.Module) -> None:
        """Allocate nothing before the engine has sharded the parameters."""

    def _materialize_shards(self, groups: list[list[str]]) -> None:
        """Allocate this process's rows of parameters that were built without memory.

        Accelerate identifies an optimizer's parameters by their memory addresses, so it has mixed these up; `groups`
        has the names of the parameters in each of the optimizer's groups.
        """
        # Through the modules, so that FSDP registers the change.
        self.unwrapped_model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor
        )
        parameters = dict(self.unwrapped_model.named_parameters())
        for group, names in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in names]

    def mark_micro_step(self, is_last: bool) -> None:
        # Every backward pass keeps FSDP2's mark of a last one: otherwise FSDP2 would keep the order of its units from
        # one micro-batch to the next, and gather the tail one time too many.
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last or self.reduces == "each_micro_batch")
        # Whether the gradients reduced within a group are also summed over the replicas.
        self.model.set_requires_all_reduce(is_last)

    def _gradient_leaves(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return gathered_parameters(self._units)

    def parameters_without_gradient(self) -> list[str]:
        parameters = self.unwrapped_model.named_parameters()
        return [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]

    def clip_and_step(self, measure_norm: bool) -> Update:
        # If the last micro-batch has not used a unit, FSDP2 would sum its gradients over the replicas in the next step.
        if any(map(waits_for_all_reduce, self._units)):
            raise BackendMismatch(
                "a part of the model got gradients from an earlier micro-batch of this step, but none from the last, "
                "with which hsdp sums gradients over its replicas; use the same parts in each micro-batch, or set "
                'compute.reduce_gradients to "last_micro_batch"'
            )
        return super().clip_and_step(measure_norm)

    @property
    def _shard_group(self) -> torch.distributed.ProcessGroup:
        return self._mesh.get_group(self._mesh.ndim - 1)

    def _smallest_gpu(self) -> int | None:
        """The memory of the smallest GPU of the job in bytes; None without GPUs."""
        if self.device.type != "cuda":
            return None
        return -self.all_max(-torch.cuda.get_device_properties(self.device).total_memory)()

    def engine_state(self) -> EngineState:
        # Gathered parameters are different objects from the sharded ones.
        self._reshard()
        return super().engine_state()

    def _exchange_averages(self) -> None:
        # What is gathered would keep the values from before.
        self._reshard()
        super()._exchange_averages()

    def _reshard(self) -> None:
        """Let go of gathered parameters, such as the root's after an evaluation."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def observe(self) -> Observed:
        is_sharded = isinstance(self.model, FSDPModule)
        return super().observe() | {
            "strategy": self.launch.strategy if is_sharded else "no sharding",
            "processes that shard the model": self._mesh.size(-1) if is_sharded else 1,
        }


def _agree_on_shards(shard_size: int, group: InitProcessGroupKwargs) -> None:
    """Refuse groups of different sizes, because the processes would wait for each other while forming them."""
    device = PartialState(**group.to_kwargs()).device
    sizes = [int(size) for size in all_gather(torch.tensor([shard_size], device=device), None)]
    if len(set(sizes)) > 1:
        found = ", ".join(f"{size} on rank {sizes.index(size)}" for size in dict.fromkeys(sizes))
        raise LaunchError(
            f"hsdp shards the model over groups of equal size, but the sizes are {found}; by default, a group is the "
            f"processes of a node: set {SHARD_SIZE} to the same number everywhere, or start as many on each node"
        )
