"""DeepSpeed ZeRO-1, -2 and -3."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from largebatch.backend.base import Backend, Observed, group_options


class ZeroBackend(Backend):
    """The DeepSpeed engine holds gradients, clips and steps; it is told where an optimizer step's micro-batches end."""

    engine: Any

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self.engine, wrapped = super().prepare(model, optimizer)
        self._watch_gradients()
        return self.engine, wrapped

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

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def update(self, learning_rate: float, measure_norm: bool) -> torch.Tensor | None:  # noqa: ARG002 - always measured
        self.set_learning_rate(learning_rate)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, device=self.device)

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
            "strategy": f"zero{stage}",
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
