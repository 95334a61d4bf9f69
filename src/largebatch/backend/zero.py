"""DeepSpeed ZeRO-1, -2 and -3."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from deepspeed.runtime.zero import Init
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from largebatch.backend.base import Backend, Observed, Update
from largebatch.backend.deepspeed_config import fill_from_plan
from largebatch.backend.deepspeed_internals import (
    PartitionedStates,
    PartitionedWeights,
    Partitions,
    hide_gathers_from_modes,
    switch_off_shared_memory,
)
from largebatch.backend.gradient_watch import GradientWatch
from largebatch.backend.launch import Launch
from largebatch.backend.state import (
    EngineState,
    Piece,
    materialize,
    parameters_without_memory,
    pieces_of,
)
from largebatch.optim.layerwise import LayerPart
from largebatch.optim.states import split_state
from largebatch.plan import RunPlan
from largebatch.storage.layout import WEIGHT, ParameterInfo


class ZeroBackend(Backend):
    """The DeepSpeed engine holds gradients, clips and steps; it is told which micro-batch ends an optimizer step."""

    engine: Any

    @staticmethod
    def accelerate_arguments(
        launch: Launch, plan: RunPlan, on_gpu: bool, group: InitProcessGroupKwargs
    ) -> dict[str, Any]:
        if not on_gpu:
            switch_off_shared_memory()
            group.backend = "gloo"
        if plan.compute.activation_checkpointing == "selective":
            hide_gathers_from_modes()
        assert launch.deepspeed_config is not None
        plugin = DeepSpeedPlugin(
            hf_ds_config=fill_from_plan(launch.deepspeed_config, plan),
            gradient_accumulation_steps=1,
            gradient_clipping=plan.optimizer.clip_norm or 0.0,
            zero3_init_flag=False,
        )
        return {"deepspeed_plugin": plugin, "kwargs_handlers": [group]}

    def __init__(self, accelerator: Accelerator, launch: Launch, plan: RunPlan):
        # Accelerate has told `transformers` about ZeRO-3, so its Auto classes would shard weights as they create them.
        # Models are built whole on every strategy, checked, and sharded by `prepare`.
        unset_hf_deepspeed_config()
        super().__init__(accelerator, launch, plan)

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self.launch.entry.zero_stage == 3 and (compiled := self._compiled) is not None:
            for region in compiled.regions:
                frozen = [name for name, parameter in region.named_parameters() if not parameter.requires_grad]
                # Frozen weights are let go before its compiled backward pass, which needs all but those that are only
                # added, such as key biases.
                if region is model or not all(name.endswith("bias") for name in frozen):
                    compiled.leave_out(region, self.launch.strategy, self.plan.compute.compile)
                    break
                # Gather its weights together before its compiled code runs, instead of in each layer inside it.
                set_z3_leaf_module(region, True)
        self.engine, wrapped = super()._wrap(model, optimizer)
        # The engine takes gradients away.
        self._watch = GradientWatch(self.unwrapped_model)
        kind = PartitionedWeights if self.engine.zero_optimization_stage() == 3 else PartitionedStates
        self._partitions: Partitions = kind(self.engine.optimizer, self.rank)
        return self.engine, wrapped

    def _materialize(self, model: nn.Module) -> None:
        """ZeRO-3 shards each parameter before the next is allocated; the other stages keep whole weights."""
        parameters = parameters_without_memory(model)
        if self.launch.entry.zero_stage != 3 or not parameters:
            super()._materialize(model)
            return
        # The engine does not move a model that is already sharded.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        first: Any = None
        for parameter in parameters:
            materialize(parameter, self.device)
            if first is None:
                Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)
                first = parameter
            else:
                first.convert_to_zero_parameters(param_list=[parameter])

    def mark_micro_step(self, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        self.engine.backward(loss * factor)

    def clip_and_step(self, measure_norm: bool) -> Update:  # noqa: ARG002 - always measured
        # The engine itself skips a step whose gradient is not finite, and reports its norm as infinite.
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.device)
        return Update(norm, applied=self.engine.was_step_applied())

    def discard_gradients(self) -> None:
        self.engine.step()
        assert not self.engine.was_step_applied()

    def _exchange_averages(self) -> None:
        super()._exchange_averages()
        self._partitions.publish()

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def _torch_optimizer(self) -> Optimizer:
        optimizer: Optimizer = self.engine.optimizer.optimizer
        return optimizer

    def _groups(self) -> dict[torch.Tensor, dict[str, Any]]:
        groups = self._torch_optimizer.param_groups
        partitions = self._partitions
        return {flat: groups[each] for flat, each in zip(partitions.masters, partitions.group_numbers, strict=True)}

    def _layer_parts(self) -> dict[torch.Tensor, list[LayerPart]]:
        names = {parameter: name for name, parameter in self.unwrapped_model.named_parameters()}
        return self._partitions.layer_parts(names)

    def engine_state(self) -> EngineState:
        partitions = self._partitions
        pieces: list[Piece] = []
        scalars: dict[str, dict[str, float]] = {}
        groups = self._groups()
        for flat, parts in self._layer_parts().items():
            owner = parts[0].name if parts else "no parameter"
            state = self._torch_optimizer.state.get(flat, {})
            states, singles = split_state(state, flat, owner, self.plan, groups[flat])
            if isinstance(partitions, PartitionedWeights):
                states[WEIGHT] = flat
            for kind, state in states.items():
                pieces += _pieces(kind, state, parts)
            scalars |= {part.name: singles for part in parts}
        parameters: dict[str, Any] = dict(self.unwrapped_model.named_parameters())
        if isinstance(partitions, PartitionedWeights):
            for name, parameter in parameters.items():
                # Frozen parameters are sharded too, but they are in no optimizer.
                if not parameter.requires_grad:
                    pieces += _pieces(WEIGHT, parameter.ds_tensor.data, [partitions.own_part(parameter, name)])
            shapes = {name: tuple(parameter.ds_shape) for name, parameter in parameters.items()}
        else:
            # Weights are whole on every process, and equal to their fp32 masters.
            vectors = {f"{WEIGHT}/{name}": parameter for name, parameter in parameters.items()}
            pieces += pieces_of(vectors, self.rank, self.world_size)
            shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return EngineState(
            parameters={name: ParameterInfo(shape, scalars.get(name, {})) for name, shape in shapes.items()},
            pieces=pieces,
            buffers=self._buffers,
        )

    def restore(
        self, fill: Callable[[EngineState], None], scalars: Mapping[str, Mapping[str, float]], with_states: Set[str]
    ) -> None:
        partitions = self._partitions
        partitions.begin_restore()
        super().restore(fill, scalars, with_states)
        partitions.end_restore()

    def observe(self) -> Observed:
        engine = self.engine
        partitions = self._partitions
        stage = engine.zero_optimization_stage()
        return super().observe() | {
            "strategy": self.launch.strategy if stage == self.launch.entry.zero_stage else f"ZeRO of stage {stage}",
            "gradient accumulation inside the engine": engine.gradient_accumulation_steps(),
            "micro-batch size in DeepSpeed": engine.train_micro_batch_size_per_gpu(),
            "micro-batch size x world size in DeepSpeed": engine.train_batch_size(),
            "gradient clipping in DeepSpeed": engine.gradient_clipping(),
            "learning-rate scheduler in DeepSpeed": engine.lr_scheduler,
            "gradient reduction in DeepSpeed": str(engine.communication_data_type),
            "autocast in DeepSpeed": engine.torch_autocast_enabled(),
            "parameters per group": partitions.group_sizes,
            "master weights": {str(partition.dtype) for partition in partitions.masters},
        }


def _pieces(kind: str, flat: torch.Tensor, parts: Iterable[LayerPart]) -> Iterator[Piece]:
    """The parts of parameters in a flat buffer of weights or of an optimizer state."""
    for part in parts:
        if part.length:
            tensor = flat.detach()[part.offset : part.offset + part.length]
            yield Piece(f"{kind}/{part.name}", part.start, tensor, (part.start, part.start + part.length))
