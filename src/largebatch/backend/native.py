"""Strategies that use torch's own gradients and optimizer: the base they share with FSDP2, one process, and DDP."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from largebatch.backend.base import Backend, Observed, Stepped, Update
from largebatch.backend.state import EngineState, own_part, share_writing
from largebatch.backend.torch_internals import settle_buckets
from largebatch.optim.groups import group_sizes
from largebatch.optim.layerwise import local_part


class NativeBackend(Backend):
    """Gradients are in `parameter.grad` and the optimizer is torch's, so clipping and stepping are done here."""

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        # Not by Accelerate, whose `backward` and optimizer step look for a package on the disk at each call.
        gradient = factor.to(loss.dtype) if isinstance(factor, torch.Tensor) else torch.full_like(loss, factor)
        loss.backward(gradient=gradient)  # type: ignore[no-untyped-call]

    def clip_and_step(self, measure_norm: bool, max_norm: float | None = None) -> Update:
        norm = None
        clip_norm = self.plan.optimizer.clip_norm
        if measure_norm or max_norm is not None or clip_norm is not None:
            with torch.no_grad():
                # Operations on DTensors go through Python for each tensor.
                gradients = [local_part(each.grad) for each in self.model.parameters() if each.grad is not None]
            # As torch computes it, from the norm of each gradient.
            norms = torch.stack(torch._foreach_norm(gradients))
            if self._is_sharded:
                norms = self._sum_vector(norms.square()).sqrt()
            norm = torch.linalg.vector_norm(norms)
            if max_norm is not None and self._is_refused(float(norm), max_norm):
                self.discard_gradients()
                return Update(norm, applied=False)
            if clip_norm is not None:
                torch._foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self._torch_optimizer.step()
        self.discard_gradients()
        return Update(norm, applied=True)

    def _is_refused(self, norm: float, max_norm: float) -> bool:
        if not math.isfinite(max_norm):
            return not math.isfinite(norm)
        # Devices of different kinds may round the same norm differently.
        return bool(self.all_max(int(not norm <= max_norm))())

    def discard_gradients(self) -> None:
        # As `zero_grad` does, without its record for the profiler.
        for group in self._torch_optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def _torch_optimizer(self) -> Optimizer:
        optimizer: Optimizer = self.optimizer.optimizer  # type: ignore[attr-defined]  # Accelerate's wrapper
        return optimizer

    def _stepped(self) -> Iterator[Stepped]:
        groups = {each: group for group in self._torch_optimizer.param_groups for each in group["params"]}
        for name, parameter in self.unwrapped_model.named_parameters():
            if parameter.requires_grad:
                yield parameter, groups[parameter], [own_part(name, parameter)]

    def engine_state(self) -> EngineState:
        state = super().engine_state()
        return replace(state, pieces=share_writing(state.pieces, *self._replica))

    @property
    def _replica(self) -> tuple[int, int]:
        """The place of this process among those that hold the same parts of all tensors, and their number."""
        return self.rank, self.world_size

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

    def _accelerator_arguments(self, on_gpu: bool, group: InitProcessGroupKwargs) -> dict[str, Any]:
        # Broadcasting rank 0's buffers would lose the other processes' statistics, which are averaged before use.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        return {"cpu": not on_gpu, "kwargs_handlers": [group, ddp]}

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        super()._wrap(model, optimizer)
        if isinstance(self.model, DistributedDataParallel):
            self._settle_buckets(self.model)

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
        # The backward pass goes through this chain of sums from the last to the first.
        total = torch.zeros((), device=self.device)
        for parameter in model.parameters():
            if parameter.requires_grad:
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
