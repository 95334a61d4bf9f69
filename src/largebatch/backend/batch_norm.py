"""BatchNorm's running statistics, made independent of the number of processes.

In training, BatchNorm normalizes each micro-batch by its own statistics (Goyal et al. 2017, section 2.3), and torch
moves the running ones after each micro-batch, so that they would depend on how many micro-batches each process has.
Here they move once per optimizer step, toward the mean of all its micro-batches' statistics, and are averaged over the
processes before they are used. With one micro-batch per process that is what torch does.
"""

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.errors import UserError
from largebatch.model.activation_checkpointing import statistics_kept


class RunningStatistics:
    """The running statistics of a model's BatchNorm layers.

    Raises:
        UserError: A layer has `momentum=None`, a cumulative average over every micro-batch.
    """

    def __init__(self, model: nn.Module):
        self._layers: list[tuple[_BatchNorm, float]] = []
        self.names: set[str] = set()  # names of the running means and variances
        self._copies: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                if module.momentum is None:
                    raise UserError(
                        f"{name} has momentum=None, a running average that depends on the number of processes; give it "
                        "a number, such as 0.1"
                    )
                self._layers.append((module, module.momentum))
                self.names |= {f"{name}.{kind}".lstrip(".") for kind in ("running_mean", "running_var")}

    def begin_micro_step(self, micro_step: int, accumulation: int) -> None:
        """Set the momentum with which the next micro-batch moves the statistics.

        With m the layer's momentum and A micro-batches, the momenta (m/A) / (1 - (A - k) m/A), k = 1 to A, give the old
        statistics a weight of 1 - m and each micro-batch m/A.
        """
        for layer, momentum in self._layers:
            share = momentum / accumulation
            layer.momentum = share / (1 - (accumulation - 1 - micro_step) * share)

    def kept(self) -> AbstractContextManager[None]:
        """In the block, layers normalize as in training but leave their statistics unchanged."""
        return statistics_kept([layer for layer, _ in self._layers])

    @torch.no_grad()
    def average(self, world_size: int, completed_steps: int) -> None:
        """Average the statistics over all processes, with one reduction, and set their counters to the steps."""
        for layer, _ in self._layers:
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(completed_steps)
        buffers = self._buffers()
        if world_size == 1 or not buffers:
            return
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        torch.distributed.all_reduce(flat)
        flat /= world_size
        for buffer, values in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def remember(self) -> None:
        self._copies = [buffer.clone() for buffer in self._buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the statistics back to their values at the last `remember`."""
        for buffer, copy in zip(self._buffers(), self._copies, strict=True):
            buffer.copy_(copy)

    def _buffers(self) -> list[torch.Tensor]:
        buffers = (buffer for layer, _ in self._layers for buffer in (layer.running_mean, layer.running_var))
        return [buffer for buffer in buffers if buffer is not None]
