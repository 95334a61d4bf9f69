"""DeepSpeed ZeRO-1, -2 and -3."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from deepspeed.runtime.zero import Init
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from largebatch.backend.base import Backend, Observed, Stepped, Update
from largebatch.backend.deepspeed_config import fill_from_plan
from largebatch.backend.deepspeed_internals import (
    add_biases_before_rounding,
    buffers_of_states,
    buffers_of_weights,
    copy_from_masters,
    copy_to_masters,
    hide_gathers_from_modes,
    part_of_weight,
    partition_weights,
    publish_masters,
    refuse_replaced_weights,
    share_compiled_code,
    steps_up_to,
    switch_off_shared_memory,
)
from largebatch.backend.launch import Launch
from largebatch.backend.state import (
    EngineState,
    Piece,
    materialize,
    parameters_without_memory,
    piece_of,
    share_writing,
)
from largebatch.plan import RunPlan
from largebatch.storage.layout import WEIGHT


class ZeroBackend(Backend):
    """The DeepSpeed engine holds gradients, clips and steps; it is told which micro-batch ends an optimizer step."""

    engine: Any

    def __init__(self, launch: Launch, plan: RunPlan, group: InitProcessGroupKwargs):
        super().__init__(launch, plan, group)
        # Accelerate has told `transformers` about ZeRO-3, so its Auto classes would shard weights as they create them.
        # Models are built whole on every strategy, checked, and sharded by `prepare`.
        unset_hf_deepspeed_config()
        self._shards_weights = launch.entry.zero_stage == 3

    def _accelerator_arguments(self, on_gpu: bool, group: InitProcessGroupKwargs) -> dict[str, Any]:
        if not on_gpu:
            switch_off_shared_memory()
            group.backend = "gloo"
        if self.plan.compute.activation_checkpointing == "selective":
            hide_gathers_from_modes()
        refuse_replaced_weights()
        add_biases_before_rounding()
        share_compiled_code()
        assert self.launch.deepspeed_config is not None
        plugin = DeepSpeedPlugin(
            hf_ds_config=fill_from_plan(self.launch.deepspeed_config, self.plan),
            zero3_init_flag=False,
        )
        return {"deepspeed_plugin": plugin, "kwargs_handlers": [group]}

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        if self._shards_weights and (compiled := self._compiled) is not None:
            for region in compiled.regions:
                frozen = [name for name, parameter in region.named_parameters() if not parameter.requires_grad]
                # Frozen weights are let go before its compiled backward pass, which needs all but those that are only
                # added, such as key biases.
                if region is model or not all(name.endswith("bias") for name in frozen):
                    compiled.leave_out(region)
                    break
                # Gather its weights together before its compiled code runs, instead of in each layer inside it.
                set_z3_leaf_module(region, True)
        super()._wrap(model, optimizer)
        self.engine = self.model
        find_buffers = buffers_of_weights if self._shards_weights else buffers_of_states
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._buffers = find_buffers(self.engine.optimizer, self.rank, names)

    def _materialize(self, model: nn.Module) -> None:
        """ZeRO-3 shards each parameter before the next is allocated; the other stages keep whole weights."""
        parameters = parameters_without_memory(model)
        if not self._shards_weights or not parameters:
            super()._materialize(model)
            return
        # The engine does not move a model that is already sharded.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        first: Any
        first, *others = parameters
        materialize(first, self.device)
        Init(module=nn.ParameterList([first]), config_dict_or_path=config)
        for parameter in others:
            materialize(parameter, self.device)
            first.convert_to_zero_parameters(param_list=[parameter])

    def mark_micro_step(self, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        self.engine.backward(loss * factor)

    def clip_and_step(self, measure_norm: bool, max_norm: float | None = None) -> Update:  # noqa: ARG002 - always measured
        # The engine itself skips a step whose gradient is not finite, and reports its norm as infinite.
        limit: AbstractContextManager[list[float]] = nullcontext([])
        if max_norm is not None and math.isfinite(max_norm):
            limit = steps_up_to(max_norm, self.engine.optimizer, self.all_max)
        with limit as refused:
            self.engine.step()
        norm = torch.as_tensor(refused[0] if refused else self.engine.get_global_grad_norm(), device=self.device)
        return Update(norm, applied=self.engine.was_step_applied())

    def _exchange_averages(self) -> None:
        super()._exchange_averages()
        if self._shards_weights:
            partition_weights(self.engine.optimizer)
            copy_from_masters(self.engine.optimizer)
        else:
            publish_masters(self.engine.optimizer)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def _torch_optimizer(self) -> Optimizer:
        optimizer: Optimizer = self.engine.optimizer.optimizer
        return optimizer

    def _stepped(self) -> Iterator[Stepped]:
        groups = self._torch_optimizer.param_groups
        for buffer in self._buffers:
            yield buffer.weights, groups[buffer.group], buffer.parts

    def _weights(self) -> list[Piece]:
        if not self._shards_weights:
            # Weights are whole on every process, and equal to their fp32 masters.
            return share_writing(super()._weights(), self.rank, self.world_size)
        weights = [piece_of(WEIGHT, buffer.weights, part) for buffer in self._buffers for part in buffer.parts]
        parameters: Iterable[tuple[str, Any]] = self.unwrapped_model.named_parameters()
        for name, parameter in parameters:
            # Frozen parameters are sharded too, but they are in no optimizer.
            if not parameter.requires_grad:
                weights.append(piece_of(WEIGHT, parameter.ds_tensor, part_of_weight(parameter, self.rank, name)))
        return weights

    def restore(self, fill: Callable[[EngineState], None], scalars: Mapping[str, Mapping[str, float]]) -> None:
        optimizer = self.engine.optimizer
        if self._shards_weights:
            partition_weights(optimizer)
        super().restore(fill, scalars)
        if self._shards_weights:
            copy_from_masters(optimizer)
        else:
            copy_to_masters(optimizer, self.rank)

    def _group_sizes(self) -> list[int]:
        """The number of trained elements in each parameter group, over all processes; they must all call this."""
        sizes = [0] * len(self._torch_optimizer.param_groups)
        for buffer in self._buffers:
            sizes[buffer.group] += sum(part.length for part in buffer.parts)
        return [sum(each) for each in zip(*self.gather_objects(sizes), strict=True)]

    def observe(self) -> Observed:
        engine = self.engine
        stage = engine.zero_optimization_stage()
        return super().observe() | {
            "strategy": self.launch.strategy if stage == self.launch.entry.zero_stage else f"ZeRO of stage {stage}",
            "gradient accumulation inside the engine": engine.gradient_accumulation_steps(),
            "micro-batch size in DeepSpeed": engine.train_micro_batch_size_per_gpu(),
            "gradient clipping in DeepSpeed": engine.gradient_clipping(),
            "learning-rate scheduler in DeepSpeed": engine.lr_scheduler,
            "gradient reduction in DeepSpeed": str(engine.communication_data_type),
            "autocast in DeepSpeed": engine.torch_autocast_enabled(),
            "parameters per group": self._group_sizes(),
            "master weights": {str(buffer.weights.dtype) for buffer in self._buffers},
        }
