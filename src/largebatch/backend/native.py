"""Strategies that use torch's own gradients and optimizer: the base they share with FSDP2, one process, and DDP."""

from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from largebatch.backend.base import Backend, Observed, Update
from largebatch.backend.gradient_watch import GradientWatch
from largebatch.backend.launch import Launch
from largebatch.backend.state import EngineState, local_range, pieces_of
from largebatch.backend.torch_internals import settle_buckets
from largebatch.optim.groups import group_sizes
from largebatch.optim.layerwise import LayerPart
from largebatch.optim.states import split_state
from largebatch.plan import RunPlan
from largebatch.storage.layout import WEIGHT, ParameterInfo


class NativeBackend(Backend):
    """Gradients are in `parameter.grad` and the optimizer is torch's, so clipping and stepping are done here."""

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        # Not by Accelerate, whose `backward` and optimizer step look for a package on the disk at each call.
        gradient = factor.to(loss.dtype) if isinstance(factor, torch.Tensor) else torch.full_like(loss, factor)
        loss.backward(gradient=gradient)  # type: ignore[no-untyped-call]

    def clip_and_step(self, measure_norm: bool) -> Update:
        norm = None
        may_skip = self.plan.faults.on_non_finite != "stop"
        clip_norm = self.plan.optimizer.clip_norm
        if measure_norm or may_skip or clip_norm is not None:
            gradients = self._gradients_to_clip()
            norm = self._norm_of(gradients)
            if may_skip and not torch.isfinite(norm):
                self.discard_gradients()
                return Update(norm, applied=False)
            if clip_norm is not None and gradients:
                torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self._torch_optimizer.step()
        self.discard_gradients()
        return Update(norm, applied=True)

    @torch.no_grad()
    def _gradients_to_clip(self) -> list[torch.Tensor]:
        """This process's parts of the gradients that the step counts."""
        found = [each.grad for each in self.model.parameters() if each.grad is not None]
        # Operations on DTensors go through Python for each tensor.
        return [each.to_local() if isinstance(each, DTensor) else each for each in found]

    def _norm_of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients, from that of each, as torch computes it."""
        if not gradients:
            return torch.zeros((), device=self.device)
        norms = torch.stack(torch._foreach_norm(gradients))
        if self._is_sharded:
            norms = self._sum_vector(norms.square()).sqrt()
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        return norm

    def discard_gradients(self) -> None:
        # As `zero_grad` does, without its record for the profiler.
        for group in self._torch_optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def _torch_optimizer(self) -> Optimizer:
        optimizer: Optimizer = self.optimizer.optimizer  # type: ignore[attr-defined]  # Accelerate's wrapper
        return optimizer

    def _layer_parts(self) -> dict[torch.Tensor, list[LayerPart]]:
        layer_parts: dict[torch.Tensor, list[LayerPart]] = {}
        for name, parameter in self.unwrapped_model.named_parameters():
            if parameter.requires_grad:
                part, start, _ = local_range(parameter)
                layer_parts[parameter] = [LayerPart(name, start, 0, part.numel())]
        return layer_parts

    def engine_state(self) -> EngineState:
        model = self.unwrapped_model
        vectors: dict[str, torch.Tensor] = {f"{WEIGHT}/{name}": weight for name, weight in model.named_parameters()}
        scalars = {}
        others = {}
        groups = self._groups()
        for name, parameter in model.named_parameters():
            state = self._torch_optimizer.state.get(parameter, {})
            states, scalars[name] = split_state(state, parameter, name, self.plan, groups.get(parameter, {}))
            vectors |= {f"{kind}/{name}": tensor for kind, tensor in states.items()}
            others[name] = {kind: tuple(each.shape) for kind, each in states.items() if each.shape != parameter.shape}
        return EngineState(
            parameters={
                name: ParameterInfo(tuple(parameter.shape), scalars[name], others[name])
                for name, parameter in model.named_parameters()
            },
            pieces=pieces_of(vectors, self.rank, self.world_size),
            buffers=self._buffers,
        )

    def observe(self) -> Observed:
        return super().observe() | {
            "parameters per group": group_sizes(self.optimizer),
            "master weights": {str(each.dtype) for each in self.model.parameters() if each.requires_grad},
        }


class DdpBackend(NativeBackend):
    """Every process holds the whole model; DistributedDataParallel all-reduces gradients once per optimizer step, with
    its last micro-batch.

    One process has no wrapper, which would zero its gradients, add to them, and divide them, for nothing.
    """

    @staticmethod
    def accelerate_arguments(
        _launch: Launch, _plan: RunPlan, on_gpu: bool, group: InitProcessGroupKwargs
    ) -> dict[str, Any]:
        # Broadcasting rank 0's buffers would lose the other processes' statistics, which are averaged before use.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        return {"cpu": not on_gpu, "kwargs_handlers": [group, ddp]}

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        prepared = super()._wrap(model, optimizer)
        if isinstance(self.model, DistributedDataParallel):
            self._settle_buckets(self.model)
        # The buckets' gradients exist from the start.
        self._watch = GradientWatch(self.unwrapped_model)
        return prepared

    def _materialize(self, model: nn.Module) -> None:
        super()._materialize(model)
        if self.world_size == 1:
            # On CPUs Accelerate would wrap it; it leaves alone what it has prepared.
            self.accelerator.prepare_model(model, evaluation_mode=True)

    def _settle_buckets(self, model: DistributedDataParallel) -> None:
        """Let DDP assign gradients to the buckets that it will keep.

        It assigns them again after the first backward pass, in the order in which gradients arrived. How a sum over
        three or more processes is rounded depends on its place in a bucket, so the first step after a resume would
        differ from the same step of an uninterrupted run. A backward pass of zeros beforehand settles on the
        parameters' reverse order.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # The backward pass goes through this chain of sums from the last to the first.
        total = torch.zeros((), device=self.device, dtype=trainable[0].dtype)
        for parameter in trainable:
            total = total + parameter.flatten()[:1].sum() * 0.0
        settle_buckets(model, total.backward)
        self.discard_gradients()

    def discard_gradients(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            # They remain views of the buckets, in which micro-batches are then summed, without memory of their own.
            torch._foreach_zero_([each.grad for each in self.model.parameters() if each.grad is not None])
        else:
            super().discard_gradients()

    def mark_micro_step(self, is_last: bool) -> None:
        # As `DistributedDataParallel.no_sync` does, but for the forward pass too.
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = is_last

    def observe(self) -> Observed:
        wrapped = isinstance(self.model, DistributedDataParallel) or self.world_size == 1
        return super().observe() | {"strategy": self.launch.strategy if wrapped else "no gradient reduction"}
