"""The interface between a run and a strategy; nothing outside this package knows which strategy is in use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.optim import Optimizer

from largebatch.backend.batch_norm import RunningStatistics, synchronize
from largebatch.backend.compilation import CompiledRegions
from largebatch.backend.gradient_watch import GradientWatch
from largebatch.backend.launch import Launch
from largebatch.backend.processes import Processes
from largebatch.backend.state import (
    EngineState,
    Piece,
    create_state,
    materialize,
    own_part,
    parameters_without_memory,
    persistent_buffers,
    piece_of,
    set_scalars,
)
from largebatch.backend.untouched import Untouched
from largebatch.config.optimizers import EMA
from largebatch.errors import BackendMismatch, UserError
from largebatch.optim.groups import group_options
from largebatch.optim.layerwise import Group, Layers, LayerwiseOptimizer, local_part
from largebatch.optim.states import split_state
from largebatch.optim.whole_layers import LayerPart, LayerProcesses
from largebatch.plan import RunPlan
from largebatch.plan.strategies import Policy
from largebatch.storage.layout import WEIGHT, ParameterInfo

Observed = dict[str, Any]
Stepped = tuple[torch.Tensor, Group, Sequence[LayerPart]]
"""A tensor that the optimizer steps, its parameter group, and which parts of which parameters are in it."""


class Update(NamedTuple):
    """The result of an optimizer step."""

    grad_norm: torch.Tensor | None  # the global norm before clipping, a scalar on the device, if it was computed
    applied: bool  # False if weights and optimizer are unchanged, because of the gradient's norm


class Backend(Processes, ABC):
    """One strategy, configured from a plan, and the processes that it trains on.

    Args:
        launch: What the launcher asked for.
        plan: The numbers that the strategy must realize.
        group: How long processes wait for each other.
    """

    # From `prepare` on.
    model: nn.Module  # the model as the strategy wrapped it
    unwrapped_model: nn.Module  # the model as the recipe built it; strategies wrap it or change it in place
    optimizer: Optimizer
    statistics: RunningStatistics  # BatchNorm's, which differ between processes until they are averaged
    gradient_watch: GradientWatch  # of the first step's backward passes
    untouched: Untouched

    def __init__(self, launch: Launch, plan: RunPlan, group: InitProcessGroupKwargs):
        self.launch = launch
        self.plan = plan
        arguments = self._accelerator_arguments(torch.cuda.is_available(), group)
        # The backends apply autocast, in the same way on every strategy.
        self.accelerator = accelerator = Accelerator(mixed_precision="no", **arguments)
        super().__init__(accelerator.process_index, accelerator.num_processes, plan.micro_batch_size)
        # Without a launcher it is "cuda", which other threads cannot select: they need the index.
        self.device: torch.device = accelerator.device
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.is_main_process = self.rank == 0  # whether this process prints and writes
        self.is_local_main_process: bool = accelerator.is_local_main_process  # whether it is the first of its machine
        self.reduces: Policy = launch.entry.reduction_policies[0]  # when gradients are reduced; known after `prepare`
        self.learning_rate: float | None = None  # the schedule's; None until the first update
        self._compiled: CompiledRegions | None = None  # None if nothing is to be compiled

    @abstractmethod
    def _accelerator_arguments(self, on_gpu: bool, group: InitProcessGroupKwargs) -> dict[str, Any]:
        """The strategy's arguments for `Accelerator`; without a GPU, processes must communicate over gloo."""

    # --- training -------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap model and optimizer for the strategy; use the returned ones from here on."""
        if self.plan.compiles_on(self.device.type):
            self._compiled = CompiledRegions(model, self.device, self.launch.entry, self.plan.compute)
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        self._wrap(model, optimizer)
        self._locate_layers()
        self.gradient_watch = GradientWatch(self.unwrapped_model)
        if self.plan.optimizer.ema_half_life is not None:
            self.statistics.start_averages()
        self.untouched = Untouched(self.unwrapped_model, self._torch_optimizer)
        return self.model, self.optimizer

    @property
    def compiled(self) -> str:
        """What is to be compiled, in words; "" if nothing is."""
        if self._compiled is None or self._compiled.why_eager is not None:
            return ""
        regions = self._compiled.regions
        return "the whole model" if len(regions) == 1 else f"{len(regions)} blocks"

    def agree_on_compiling(self) -> str | None:
        """If one process could not compile the model, let all run it eagerly, and return why; every process must call
        this."""
        if self._compiled is None:
            return None
        for rank, failure in enumerate(self.gather_objects(self._compiled.why_eager)):
            if failure is not None:
                reason = f"on rank {rank}: {failure}"
                self._compiled.why_eager = reason
                # Nothing is left to agree on.
                self._compiled = None
                return reason
        return None

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.unwrapped_model = model
        if self.plan.precision == "bf16":
            # Not by Accelerate, which for FSDP2 would instead cast weights and gradients, and so reduce in bf16. With
            # its cache, a copy of every weight would live until the end of the forward pass, recomputed or not.
            model.forward = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)(model.forward)
        if self.plan.sync_batch_norm and self.world_size > 1:
            synchronize(model, self.device)
        self.statistics = RunningStatistics(model)
        self._materialize(model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    @property
    def _is_sharded(self) -> bool:
        """Whether each of several processes steps only parts of the parameters."""
        return self.launch.entry.steps != "whole parameters" and self.world_size > 1

    def _locate_layers(self) -> None:
        """Tell an optimizer that needs whole layers which parts of them each process steps."""
        optimizer = self._torch_optimizer
        if not isinstance(optimizer, LayerwiseOptimizer):
            return
        parts = {tensor: found for tensor, _, found in self._stepped()}
        by_rank = self.gather_objects([*parts.values()])
        ranks = torch.distributed.get_process_group_ranks(self._shard_group) if self.world_size > 1 else [0]
        held = [[[LayerPart(*part) for part in found] for found in by_rank[rank]] for rank in ranks]
        summed = self._sum_vector if self._is_sharded else lambda vector: vector
        processes = LayerProcesses(ranks.index(self.rank), held, summed, self._exchange_vectors)
        optimizer.set_layers(Layers(parts, self._shapes, processes))

    def _exchange_vectors(
        self, sent: Sequence[list[torch.Tensor]], lengths: list[int], empty: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Send vectors to each of the processes that hold a part of the model, and get vectors of these lengths."""
        vectors = torch.cat([empty, *chain(*sent)])
        if self.world_size == 1:
            return [vectors]
        # As in `_sum_vector`.
        vectors = vectors.to(self.device)
        received = vectors.new_empty(sum(lengths))
        sizes = [sum(vector.numel() for vector in each) for each in sent]
        torch.distributed.all_to_all_single(received, vectors, lengths, sizes, group=self._shard_group)
        return torch.split_with_sizes(received.to(empty.device), lengths)

    def _sum_vector(self, vector: torch.Tensor) -> torch.Tensor:
        # An offloaded optimizer's vectors are on the host, over which this group may not communicate.
        total = vector.to(self.device)
        torch.distributed.all_reduce(total, group=self._shard_group)
        return total.to(vector.device)

    @property
    def _shard_group(self) -> torch.distributed.ProcessGroup | None:
        """The processes that hold a part of the model each; None means all."""
        return None

    def _materialize(self, model: nn.Module) -> None:
        """Before the engine takes the model, allocate parameters built without memory, for `restore` to set."""
        for parameter in parameters_without_memory(model):
            materialize(parameter, self.device)

    def seed(self, seed: int) -> None:
        """Seed the model's randomness on the host and on the device.

        `torch.manual_seed` would also queue a call, with its stack, for every kind of device that is not in use, which
        costs time and memory in each step.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def begin_micro_step(self, micro_step: int, accumulation: int) -> None:
        """Prepare for the forward pass of micro-batch `micro_step`, counted from 0, of `accumulation`."""
        self.statistics.begin_micro_step(micro_step)
        self.mark_micro_step(is_last=micro_step == accumulation - 1)

    @abstractmethod
    def mark_micro_step(self, is_last: bool) -> None:
        """Tell the engine whether the next forward and backward pass is the last of an optimizer step."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Accumulate `factor` times the gradient of `loss`, both scalars; gradients are *averaged* over processes."""

    def measured_backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Do `backward`, and return the squared norm of its gradient's part in the reduced gradient, on the device.

        No gradient is kept: a hook sees each one as it arrives at its parameter.
        """
        norms: list[torch.Tensor] = []
        # FSDP2 has the tensors only after a forward pass, and torch.compile would trace the hooks in one.
        hooks = [
            leaf.register_hook(lambda gradient: norms.append(torch.linalg.vector_norm(gradient)))  # type: ignore[no-untyped-call]
            for parameter, leaf in self._gradient_leaves()
            if parameter.requires_grad
        ]
        self.backward(loss, factor)
        for hook in hooks:
            hook.remove()
        return torch.stack(norms).double().square().sum() / self.world_size**2

    def _gradient_leaves(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of the model, and the tensor at which its whole gradients of this process arrive."""
        return ((parameter, parameter) for parameter in self.unwrapped_model.parameters())

    @abstractmethod
    def clip_and_step(self, measure_norm: bool, max_norm: float | None = None) -> Update:
        """Clip the gradients as the plan says, take one optimizer step, and clear them.

        A step is not taken if the gradient's norm before clipping is not finite or larger than `max_norm`; None allows
        any. The gradient is that of all processes, so they all decide alike. If `measure_norm` is false, and nothing
        depends on the norm, it need not be computed.
        """

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the schedule's learning rate, times each parameter group's own factor.

        Raises:
            UserError: Something else has changed it since it was last set.
        """
        for group in self.optimizer.param_groups:
            factor = group.get("lr_factor", 1.0)
            if self.learning_rate is not None and group["lr"] != self.learning_rate * factor:
                raise UserError(
                    f"the learning rate of a parameter group is {group['lr']:g}, but run.update has set "
                    f"{self.learning_rate * factor:g}; it follows the recipe's learning_rate in each step: remove the "
                    "scheduler, or whatever sets it, from train.py"
                )
            group["lr"] = learning_rate * factor
        self.learning_rate = learning_rate

    # --- moving averages of the weights ---------------------------------------------------------------------------

    def set_ema_weight(self, weight: float) -> None:
        """Set the weight with which the weights after the next update enter their moving average."""
        for group in self.optimizer.param_groups:
            group["ema_weight"] = weight

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """In the block, the model has the moving averages of its weights and running statistics; every process must
        call this."""
        self._exchange_averages()
        with self.statistics.averaged():
            yield
        # Not after an error, which one process may raise alone: ZeRO communicates.
        self._exchange_averages()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        """Exchange the tensors that the optimizer steps, and so the weights, for their averages."""
        for tensor, state in self._torch_optimizer.state.items():
            weights = local_part(tensor)
            averages = local_part(state[EMA])
            copy = weights.clone()
            weights.copy_(averages)
            averages.copy_(copy)

    # --- state ----------------------------------------------------------------------------------------------------

    def engine_state(self) -> EngineState:
        """The parameters, optimizer states and buffers that this process holds, as a checkpoint stores them."""
        parameters = {name: ParameterInfo(shape, {}) for name, shape in self._shapes.items()}
        pieces = self._weights()
        for tensor, group, parts in self._stepped():
            owner = parts[0].name if parts else "no parameter"
            state = self._torch_optimizer.state.get(tensor, {})
            states, scalars = split_state(state, tensor, owner, self.plan, group)
            other_shapes = {kind: tuple(each.shape) for kind, each in states.items() if each.shape != tensor.shape}
            for part in parts:
                parameters[part.name] = ParameterInfo(self._shapes[part.name], scalars, other_shapes)
                for kind, values in states.items():
                    place = own_part(part.name, values) if kind in other_shapes else part
                    pieces.append(piece_of(kind, values, place))
        pieces = [piece for piece in pieces if piece.tensor.numel()]
        return EngineState(parameters, pieces, persistent_buffers(self.unwrapped_model) | self.statistics.averages)

    def _weights(self) -> list[Piece]:
        """What this process holds of the weights."""
        parameters = self.unwrapped_model.named_parameters()
        return [piece_of(WEIGHT, parameter, own_part(name, parameter)) for name, parameter in parameters]

    @abstractmethod
    def _stepped(self) -> Iterable[Stepped]:
        """The tensors that torch's optimizer steps on this process."""

    @property
    @abstractmethod
    def _torch_optimizer(self) -> Optimizer:
        """Torch's own optimizer, inside the strategy's wrapper."""

    def restore(self, fill: Callable[[EngineState], None], scalars: Mapping[str, Mapping[str, float]]) -> None:
        """Set the whole state of this process; every process must call this.

        Args:
            fill: Writes every piece and buffer of the given state. A user error on one process is raised on all.
            scalars: The optimizer's scalar states, such as its step count, for each parameter that it has states for,
                because it has stepped it.

        Raises:
            BackendMismatch: Parameters that share one optimizer state under this strategy have different scalars, or
                the optimizer does not have one of them.
        """
        optimizer = self._torch_optimizer
        stepped = {}
        for tensor, group, parts in self._stepped():
            if any(part.name in scalars for part in parts):
                stepped[tensor] = parts
                create_state(optimizer, tensor, group, self.plan)
            else:
                optimizer.state.pop(tensor, None)
        # The engine may communicate next, so if one process raises, all must.
        with self.raise_on_all_ranks():
            fill(self.engine_state())
            for tensor, parts in stepped.items():
                numbers = [dict(scalars.get(part.name, {})) for part in parts]
                if any(other != numbers[0] for other in numbers):
                    raise BackendMismatch(
                        f"the optimizer's scalar states differ between {parts[0].name} and other parameters in the "
                        f"checkpoint, but {self.launch.strategy} has one for all of them; resume with ddp or fsdp"
                    )
                set_scalars(optimizer.state[tensor], numbers[0])

    def end(self) -> None:
        """Leave the process group together with all other processes."""
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    # --- checking -------------------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        """The actual settings of the prepared engine, under the names of `check.expect`."""
        return {
            "hyperparameters per group": group_options(self._torch_optimizer),
        }
