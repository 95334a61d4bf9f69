"""DeepSpeed ZeRO-1, -2 and -3."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from deepspeed.runtime.zero import Init
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from largebatch.backend.base import Backend, Observed, Request, Update, group_options
from largebatch.backend.compilation import refuse_to_compile
from largebatch.backend.deepspeed_config import fill_from_plan
from largebatch.backend.launch import Launch
from largebatch.backend.state import (
    EngineState,
    OptimizerSlot,
    Piece,
    materialize,
    parameters_without_memory,
    persistent_buffers,
    pieces_of,
    split_state,
    weight_vectors,
)
from largebatch.errors import UserError
from largebatch.optim.layerwise import LayerPart
from largebatch.plan import RunPlan
from largebatch.plan.strategies import names_of
from largebatch.storage.layout import WEIGHT, ParameterInfo


@dataclass(frozen=True)
class _Place:
    """Where a part of a parameter lies in a flat buffer.

    Args:
        name: The parameter.
        start: First element of the part, in the parameter.
        offset: In the buffer.
        length: Elements.
    """

    name: str
    start: int
    offset: int
    length: int

    def piece_of(self, kind: str, flat: torch.Tensor) -> Piece:
        """This part of a buffer of weights or of an optimizer state."""
        tensor = flat.detach()[self.offset : self.offset + self.length]
        return Piece(f"{kind}/{self.name}", self.start, tensor, (self.start, self.start + self.length))


@dataclass(frozen=True)
class _Partition:
    """A flat buffer of fp32 masters of this process, and the parameters' parts in it."""

    flat: torch.Tensor
    places: list[_Place]


class ZeroBackend(Backend):
    """The DeepSpeed engine holds gradients, clips and steps; it is told where an optimizer step's micro-batches end."""

    engine: Any

    @staticmethod
    def accelerate_arguments(request: Request) -> dict[str, Any]:
        launch, plan, on_gpu, group = request
        if not on_gpu:
            # DeepSpeed would compile a shared-memory collective (some 40 s), and a run killed meanwhile would leave a
            # lock on which every later run waits for ever.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            group.backend = "gloo"
        assert launch.deepspeed_config is not None
        plugin = DeepSpeedPlugin(
            hf_ds_config=fill_from_plan(launch.deepspeed_config, plan),
            gradient_accumulation_steps=1,
            gradient_clipping=plan.clip_norm or 0.0,
            zero3_init_flag=False,
        )
        return {"deepspeed_plugin": plugin, "kwargs_handlers": [group]}

    def __init__(self, accelerator: Accelerator, launch: Launch, plan: RunPlan):
        # Accelerate has told `transformers` of ZeRO-3, whose Auto classes would cut up weights as they make them,
        # before anything can look at them. Models are built whole on every strategy, and cut up by `prepare`.
        unset_hf_deepspeed_config()
        super().__init__(accelerator, launch, plan)
        assert launch.deepspeed_config is not None
        self._stage: int = launch.deepspeed_config["zero_optimization"]["stage"]
        """The stage that was launched."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self._stage == 3:
            for region in self._compiled:
                if region is model:
                    raise refuse_to_compile(region, self.launch.strategy)
                frozen = [name for name, parameter in region.named_parameters() if not parameter.requires_grad]
                # What is only added, such as frozen key biases, no backward pass needs.
                if not all(name.endswith("bias") for name in frozen):
                    raise UserError(
                        f"compute.compile: {self.launch.strategy} does not gather the frozen weights of "
                        f"{type(region).__name__} again for its compiled backward pass; write false, or launch with "
                        + names_of(lambda entry: entry.name != self.launch.strategy)
                    )
                # Its weights are gathered together, before its compiled code runs, and not by each layer within it.
                set_z3_leaf_module(region, True)
        self.engine, wrapped = super()._wrap(model, optimizer)
        self._watch_gradients()
        return self.engine, wrapped

    def _materialize(self, model: nn.Module) -> None:
        """ZeRO-3 has each parameter cut up before the next one is made; the other stages keep whole weights."""
        parameters = parameters_without_memory(model)
        if self._stage != 3 or not parameters:
            super()._materialize(model)
            return
        # The engine leaves a model that is cut up already where it is.
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

    def _watch_gradients(self) -> None:
        """The engine takes gradients away as they come: note which parameters had one, until that has been asked."""
        trainable = {name: p for name, p in self.unwrapped_model.named_parameters() if p.requires_grad}
        self._without_gradient = set(trainable)
        self._watches: list[RemovableHandle] = [
            parameter.register_hook(partial(self._note_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in trainable.items()
        ]

    def _note_gradient(self, name: str, _: torch.Tensor) -> None:
        self._without_gradient.discard(name)

    def parameters_without_gradient(self) -> list[str]:
        for watch in self._watches:
            watch.remove()
        return sorted(self._without_gradient)

    def mark_micro_step(self, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        self.engine.backward(loss * factor)

    def update(self, learning_rate: float, measure_norm: bool) -> Update:  # noqa: ARG002 - always measured
        self.set_learning_rate(learning_rate)
        # The engine leaves out, by itself, a step whose gradient is not finite, and gives its norm as infinite.
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.device)
        return Update(norm, applied=self.engine.was_step_applied())

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def _torch_optimizer(self) -> Optimizer:
        optimizer: Optimizer = self.engine.optimizer.optimizer
        return optimizer

    @property
    def _shards_weights(self) -> bool:
        return bool(self.engine.zero_optimization_stage() == 3)

    def _partitions(self) -> list[_Partition]:
        """The flat buffers of this process that the optimizer steps, and what is where in them."""
        zero = self.engine.optimizer
        names = {parameter: name for name, parameter in self.unwrapped_model.named_parameters()}
        partitions = []
        if self._shards_weights:
            # Each parameter is padded and cut into equal parts; a sub-group's buffer has this process's part of each.
            for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
                places, offset = [], 0
                for parameter in group:
                    places.append(self._place_of_shard(parameter, names[parameter], offset))
                    offset += parameter.ds_tensor.ds_numel
                partitions.append(_Partition(flat, places))
            return partitions
        # A parameter group's parameters lie behind one another in one buffer, which is padded and cut into equal parts.
        for flat, group, offsets in zip(
            zero.single_partition_of_fp32_groups,
            zero.round_robin_bit16_groups,
            zero.round_robin_bit16_offsets,
            strict=True,
        ):
            first, last = self.rank * flat.numel(), (self.rank + 1) * flat.numel()
            places = []
            for parameter, begin in zip(group, offsets, strict=True):
                start, stop = max(begin, first), min(begin + parameter.numel(), last)
                if start < stop:
                    places.append(_Place(names[parameter], start - begin, start - first, stop - start))
            partitions.append(_Partition(flat, places))
        return partitions

    def _place_of_shard(self, parameter: Any, name: str, offset: int) -> _Place:
        """What this process has of a parameter that ZeRO-3 has cut up, at `offset` of a buffer; without the padding."""
        size = parameter.ds_tensor.ds_numel
        start = min(self.rank * size, parameter.ds_numel)
        return _Place(name, start, offset, min(size, parameter.ds_numel - start))

    def _optimizer_slots(self) -> list[OptimizerSlot]:
        return [
            OptimizerSlot(
                partition.flat, [LayerPart(place.name, place.offset, place.length) for place in partition.places]
            )
            for partition in self._partitions()
        ]

    def engine_state(self) -> EngineState:
        pieces: list[Piece] = []
        scalars: dict[str, dict[str, float]] = {}
        for partition in self._partitions():
            owner = partition.places[0].name if partition.places else "no parameter"
            state = self._torch_optimizer.state.get(partition.flat, {})
            states, numbers = split_state(state, partition.flat, owner, self.plan)
            if self._shards_weights:
                states[WEIGHT] = partition.flat
            for kind, state in states.items():
                pieces += [place.piece_of(kind, state) for place in partition.places if place.length]
            scalars |= {place.name: numbers for place in partition.places}
        parameters: dict[str, Any] = dict(self.unwrapped_model.named_parameters())
        if self._shards_weights:
            pieces += self._frozen_pieces()
            shapes = {name: tuple(parameter.ds_shape) for name, parameter in parameters.items()}
        else:
            # Weights are whole on every process, and equal to their fp32 masters.
            pieces += pieces_of(weight_vectors(self.unwrapped_model), self.rank, self.world_size)
            shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return EngineState(
            parameters={name: ParameterInfo(shape, scalars.get(name, {})) for name, shape in shapes.items()},
            pieces=pieces,
            buffers=persistent_buffers(self.unwrapped_model),
        )

    def _frozen_pieces(self) -> list[Piece]:
        """ZeRO-3 cuts up parameters that are not trained, too, but no optimizer has them."""
        pieces = []
        parameters: Iterator[tuple[str, Any]] = self.unwrapped_model.named_parameters()
        for name, parameter in parameters:
            if not parameter.requires_grad:
                place = self._place_of_shard(parameter, name, 0)
                if place.length:
                    pieces.append(place.piece_of(WEIGHT, parameter.ds_tensor.data))
        return pieces

    def restore(
        self, fill: Callable[[EngineState], None], scalars: Mapping[str, Mapping[str, float]], has_states: bool
    ) -> None:
        zero = self.engine.optimizer
        if self._shards_weights:
            # Small parameters are kept whole between steps: put them away, and gather them again.
            zero._partition_all_parameters()
        super().restore(fill, scalars, has_states)
        if self._shards_weights:
            for whole, master in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
                whole.data.copy_(master.data)
            zero.invalidate_secondary_tensor()
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
            return
        for parts, master in zip(
            zero.parallel_partitioned_bit16_groups, zero.single_partition_of_fp32_groups, strict=True
        ):
            master.data.copy_(parts[self.rank].data)

    def observe(self) -> Observed:
        engine, zero = self.engine, self.engine.optimizer
        stage = engine.zero_optimization_stage()
        if stage == 3:
            # Stage 3 splits each parameter group into sub-groups.
            sizes = [0] * len(zero.optimizer.param_groups)
            for number, parameters in enumerate(zero.fp16_groups):
                sizes[zero.sub_group_to_group_id[number]] += sum(parameter.ds_numel for parameter in parameters)
            masters = zero.fp32_partitioned_groups_flat
        else:
            sizes = [sum(parameter.numel() for parameter in group) for group in zero.bit16_groups]
            masters = zero.single_partition_of_fp32_groups
        return self.observe_launch() | {
            "strategy": self.launch.strategy if stage == self._stage else f"ZeRO of stage {stage}",
            "gradient accumulation inside the engine": engine.gradient_accumulation_steps(),
            "micro-batch size in DeepSpeed": engine.train_micro_batch_size_per_gpu(),
            "micro-batch size x world size in DeepSpeed": engine.train_batch_size(),
            "gradient clipping in DeepSpeed": engine.gradient_clipping(),
            "learning-rate scheduler in DeepSpeed": engine.lr_scheduler,
            "gradient reduction in DeepSpeed": str(engine.communication_data_type),
            "autocast in DeepSpeed": engine.torch_autocast_enabled(),
            "parameters per group": sizes,
            "hyperparameters per group": group_options(zero.optimizer),
            "master weights": {str(partition.dtype) for partition in masters},
        }
