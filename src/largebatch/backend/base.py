"""The interface between a run and a strategy; nothing outside this package knows which strategy is in use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.optim import Optimizer

from largebatch.backend.batch_norm import RunningStatistics, is_synchronized, synchronize
from largebatch.backend.compilation import CompiledRegions, compiles_whole
from largebatch.backend.gradient_watch import GradientWatch
from largebatch.backend.kept import KeptStates
from largebatch.backend.launch import Launch
from largebatch.backend.processes import Processes
from largebatch.backend.state import (
    EngineState,
    fresh_state,
    materialize,
    parameters_without_memory,
    persistent_buffers,
    set_scalars,
)
from largebatch.backend.untouched import Untouched
from largebatch.config.optimizers import EMA
from largebatch.errors import BackendMismatch, UserError
from largebatch.optim.groups import group_options
from largebatch.optim.layerwise import LayerPart, LayerwiseOptimizer, local_part
from largebatch.optim.whole_layers import LayerProcesses, LayerRange
from largebatch.plan import RunPlan
from largebatch.plan.strategies import Policy, names_of

Observed = dict[str, Any]


class Update(NamedTuple):
    """The result of an optimizer step."""

    grad_norm: torch.Tensor | None  # the global norm before clipping, a scalar on the device, if it was computed
    applied: bool  # False if weights and optimizer are unchanged, as the gradient was not finite; True if not checked


class Backend(ABC):
    """One strategy, configured from a plan.

    Args:
        accelerator: Accelerate, started for this strategy.
        launch: What the launcher asked for.
        plan: The numbers that the strategy must realize.
    """

    def __init__(self, accelerator: Accelerator, launch: Launch, plan: RunPlan):
        self.processes = Processes(accelerator.process_index, accelerator.num_processes, plan.micro_batch_size)
        self.rank = self.processes.rank
        self.world_size = self.processes.world_size
        # Those that every part of a run asks for.
        self.all_gather = self.processes.all_gather
        self.all_max = self.processes.all_max
        self.gather_objects = self.processes.gather_objects
        self.raise_on_all_ranks = self.processes.raise_on_all_ranks
        self.accelerator = accelerator
        self.launch = launch
        self.plan = plan
        # Without a launcher it is "cuda", which other threads cannot select: they need the index.
        self.device: torch.device = accelerator.device
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.is_main_process: bool = self.rank == 0  # whether this process prints and writes
        self.is_local_main_process: bool = accelerator.is_local_main_process  # whether it is the first of its machine
        self.model: nn.Module  # the model as the strategy wrapped it
        self.has_checked_features = False  # whether a step's features were alike in all batches, as later ones will be
        self.unwrapped_model: nn.Module  # the model as the recipe built it; strategies wrap it or change it in place
        self.optimizer: Optimizer
        self.statistics: RunningStatistics  # BatchNorm's, which differ between processes until they are averaged
        self.reduces: Policy = launch.entry.reduction_policies[0]  # when gradients are reduced; known after `prepare`
        self._learning_rate: float | None = None  # the schedule's; None until the first update
        self.kept = KeptStates()
        self._compiled: CompiledRegions | None = None  # None if nothing is to be compiled
        self._watch: GradientWatch
        self.untouched: Untouched

    @staticmethod
    @abstractmethod
    def accelerate_arguments(
        launch: Launch, plan: RunPlan, on_gpu: bool, group: InitProcessGroupKwargs
    ) -> dict[str, Any]:
        """The strategy's arguments for `Accelerator`; without a GPU, processes must communicate over gloo.

        `group` says how long processes wait for each other.
        """

    # --- training -------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap model and optimizer for the strategy; use the returned ones from here on."""
        if self.plan.compiles_on(self.device.type):
            is_whole = compiles_whole(model, self.launch.entry, self.plan.compute)
            self._compiled = CompiledRegions(model, self.device, is_whole)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
        prepared = self._wrap(model, optimizer)
        self._locate_layers(shapes)
        if self.plan.optimizer.ema_half_life is not None:
            self.statistics.start_averages()
        self.untouched = Untouched(self.unwrapped_model, self._torch_optimizer)
        return prepared

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
        failures = self.gather_objects(self._compiled.why_eager)
        reason = next((f"on rank {rank}: {each}" for rank, each in enumerate(failures) if each is not None), None)
        if reason is not None:
            self._compiled.why_eager = reason
            # Nothing is left to agree on.
            self._compiled = None
        return reason

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
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
        return self.model, self.optimizer

    @property
    def _is_sharded(self) -> bool:
        """Whether each of several processes steps only parts of the parameters."""
        return self.launch.entry.steps != "whole parameters" and self.world_size > 1

    def _groups(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The parameter group of each tensor that the optimizer steps."""
        return {each: group for group in self._torch_optimizer.param_groups for each in group["params"]}

    def _locate_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Tell an optimizer that needs whole layers, of these shapes, which parts of them each process steps."""
        optimizer = self._torch_optimizer
        if not isinstance(optimizer, LayerwiseOptimizer):
            return
        parts = self._layer_parts()
        ranges = [
            (part.name, number, part.start, part.length)
            for number, found in enumerate(parts.values())
            for part in found
        ]
        everyone = self.gather_objects(ranges)
        ranks = torch.distributed.get_process_group_ranks(self._shard_group) if self.world_size > 1 else [0]
        held = [{each[0]: LayerRange(*each) for each in everyone[rank]} for rank in ranks]
        together = self._sum_vector if self._is_sharded else lambda vector: vector
        processes = LayerProcesses(ranks.index(self.rank), held, together, self._exchange_vectors)
        optimizer.set_layer_parts(parts, shapes, processes)

    def _exchange_vectors(
        self, sent: Sequence[list[torch.Tensor]], lengths: list[int], empty: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Send vectors to each of the processes that hold a part of the model, and get vectors of these lengths."""
        vectors = torch.cat([empty, *(vector for each in sent for vector in each)])
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

    def begin_step(self) -> None:
        """Prepare for the passes and the update of a step."""
        self.untouched.forget()

    def begin_micro_step(self, micro_step: int, accumulation: int) -> None:
        """Prepare for the forward pass of micro-batch `micro_step`, counted from 0, of `accumulation`."""
        if micro_step == 0 and self.plan.faults.on_non_finite == "skip":
            self.statistics.remember()
        self.statistics.begin_micro_step(micro_step, accumulation)
        self.mark_micro_step(is_last=micro_step == accumulation - 1)

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Run forward passes that are repeated later in the step with the same numbers: without gradients, and without
        moving BatchNorm's running statistics."""
        with torch.no_grad(), self.statistics.kept():
            yield

    @abstractmethod
    def mark_micro_step(self, is_last: bool) -> None:
        """Tell the engine whether the next forward and backward pass is the last of an optimizer step."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Accumulate `factor` times the gradient of `loss`, both scalars; gradients are *averaged* over processes."""

    def measured_backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """`backward`, which returns the squared norm of its gradient's part in the reduced gradient, on the device.

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
    def clip_and_step(self, measure_norm: bool) -> Update:
        """Clip the gradients as the plan says, take one optimizer step, and clear them.

        A step whose gradient is not finite is not taken, unless the plan's `on_non_finite` is "stop". The gradient is
        that of all processes, so they all decide alike. If `measure_norm` is false, its norm need not be computed.
        """

    @contextmanager
    def future_states(self) -> Iterator[None]:
        """For the duration of the block, the optimizer has states of all parameters: on the meta device, of those that
        it has not stepped yet."""
        state = self._torch_optimizer.state
        unstepped = {tensor: group for tensor, group in self._groups().items() if not state.get(tensor)}
        for tensor, group in unstepped.items():
            for kind, shape in self.plan.states_of(tuple(tensor.shape), group).items():
                like = torch.empty_like(tensor, device="meta")
                state[tensor][kind] = like if shape == tensor.shape else like.new_empty(shape) if shape else 0.0
        yield
        for tensor in unstepped:
            state.pop(tensor, None)

    @abstractmethod
    def discard_gradients(self) -> None:
        """Clear gradients that are not finite, without an update."""

    def parameters_without_gradient(self) -> list[str]:
        """Names of trainable parameters that the first step's backward passes did not reach; before its `update`."""
        return self._watch.end()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the schedule's learning rate, times each parameter group's own factor.

        Raises:
            UserError: Something else has changed it since it was last set.
        """
        if self._learning_rate is not None:
            self._check_learning_rate(self._learning_rate)
        self._learning_rate = learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_factor", 1.0)

    @property
    def learning_rate(self) -> float:
        """The schedule's learning rate, as the optimizer has it, from the first update on; UserError if it has not."""
        assert self._learning_rate is not None
        self._check_learning_rate(self._learning_rate)
        return self._learning_rate

    def _check_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            expected = learning_rate * group.get("lr_factor", 1.0)
            if group["lr"] != expected:
                raise UserError(
                    f"the learning rate of a parameter group is {group['lr']:g}, but run.update has set {expected:g}; "
                    "it follows the recipe's learning_rate in each step: remove the scheduler from train.py"
                )

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
        self.statistics.show_averages()
        yield
        self.statistics.restore()
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

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that checkpoints have: the model's, and the averages of its running statistics."""
        return persistent_buffers(self.unwrapped_model) | self.statistics.averages

    @abstractmethod
    def engine_state(self) -> EngineState:
        """The parameters, optimizer states and buffers that this process holds, as a checkpoint stores them."""

    @abstractmethod
    def _layer_parts(self) -> dict[torch.Tensor, list[LayerPart]]:
        """The tensors that torch's optimizer steps on this process, and which parts of which parameters are in each."""

    @property
    @abstractmethod
    def _torch_optimizer(self) -> Optimizer:
        """Torch's own optimizer, inside the strategy's wrapper."""

    def restore(
        self, fill: Callable[[EngineState], None], scalars: Mapping[str, Mapping[str, float]], with_states: Set[str]
    ) -> None:
        """Set the whole state of this process; every process must call this.

        Args:
            fill: Writes every piece and buffer of the given state. A user error on one process is raised on all.
            scalars: The optimizer's scalar states, such as its step count, for each parameter.
            with_states: The parameters that the optimizer has states for, because it has stepped them.

        Raises:
            BackendMismatch: Parameters that share one optimizer state under this strategy have different scalars, or
                the optimizer does not have one of them.
        """
        optimizer = self._torch_optimizer
        layer_parts = self._layer_parts()
        stepped = {
            tensor: parts for tensor, parts in layer_parts.items() if any(part.name in with_states for part in parts)
        }
        for tensor in layer_parts.keys() - stepped.keys():
            optimizer.state.pop(tensor, None)
        fresh_state(
            optimizer, {tensor: group for tensor, group in self._groups().items() if tensor in stepped}, self.plan
        )
        # The engine may communicate next, so if one process raises, all must.
        with self.raise_on_all_ranks():
            fill(self.engine_state())
            for tensor, parts in stepped.items():
                numbers = [dict(scalars[part.name]) for part in parts]
                if any(other != numbers[0] for other in numbers):
                    raise BackendMismatch(
                        f"the optimizer's scalar states differ between {parts[0].name} and other parameters in the "
                        f"checkpoint, but {self.launch.strategy} has one for all of them; resume with "
                        + names_of(lambda entry: entry.steps != "flat pieces of several parameters")
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
            "world size": self.world_size,
            "gradient accumulation inside the engine": self.accelerator.gradient_accumulation_steps,
            "mixed precision by Accelerate": self.accelerator.mixed_precision,
            "BatchNorm over all processes": is_synchronized(self.model),
            "hyperparameters per group": group_options(self._torch_optimizer),
        }
