"""BatchNorm over several processes: its running statistics, and layers that normalize over all processes together.

In training, BatchNorm normalizes each micro-batch by its own statistics (Goyal et al. 2017, section 2.3), and torch
moves the running ones after each micro-batch, so that they would depend on how many micro-batches each process has.
Here they move once per optimizer step, toward the mean of all its micro-batches' statistics: each micro-batch moves
them from where they were before the step, as torch does, and the mean of the results is kept. (A smaller momentum for
each would do, too, but is a constant of compiled code.) They are averaged over the processes before they are used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.config.optimizers import EMA
from largebatch.errors import UserError


class RunningStatistics:
    """The running statistics of a model's BatchNorm layers.

    Raises:
        UserError: A layer has `momentum=None`, a cumulative average over every micro-batch.
    """

    def __init__(self, model: nn.Module):
        self._layers: list[_BatchNorm] = []
        self._places: dict[str, tuple[_BatchNorm, str]] = {}  # layer and attribute of each, by name
        self.averages: dict[str, torch.Tensor] = {}  # their moving averages, if there are any, by name
        self._before: list[torch.Tensor] = []  # as remembered
        self._means: list[torch.Tensor] = []  # over the step's micro-batches so far
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                if module.momentum is None:
                    raise UserError(
                        f"{name} has momentum=None, a running average that depends on the number of processes; give it "
                        "a number, such as 0.1"
                    )
                self._layers.append(module)
                for kind in ("running_mean", "running_var"):
                    self._places[f"{name}.{kind}".lstrip(".")] = (module, kind)

    @property
    def names(self) -> set[str]:
        """The names of the running means and variances, and of their moving averages."""
        return {*self._places, *self.averages}

    @property
    def copied_bytes(self) -> int:
        """The size of what a step copies: the statistics before it, and the means over its micro-batches."""
        return 2 * sum(buffer.nbytes for buffer in self._buffers())

    def start_averages(self) -> None:
        """Keep moving averages of the statistics, too; to be called when the model is on its device."""
        buffers = zip(self._places, self._buffers(), strict=True)
        self.averages = {f"{EMA}/{name}": buffer.clone() for name, buffer in buffers}

    def move_averages(self, weight: float) -> None:
        """Move the averages toward the statistics after an update of the weights, as `RunPlan.ema_weight_at` says."""
        if self.averages:
            torch._foreach_lerp_(list(self.averages.values()), self._buffers(), weight)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In the block, the statistics are their averages."""
        now = self._copied()
        self._set(list(self.averages.values()))
        try:
            yield
        finally:
            self._set(now)

    def begin_micro_step(self, micro_step: int) -> None:
        """Before the forward pass of a micro-batch, set the statistics to what they were before the step."""
        if micro_step == 0:
            self.remember()
        else:
            self.restore()

    @torch.no_grad()
    def end_forward(self, micro_step: int) -> None:
        """Note what the micro-batch has made of the statistics; its backward pass may recompute blocks."""
        if micro_step == 0:
            self._means = self._copied()
        elif self._means:
            # Statistics of layers that are in evaluation mode remain as they are, to the last bit.
            torch._foreach_lerp_(self._means, self._buffers(), 1 / (micro_step + 1))

    def end_step(self) -> None:
        """After all backward passes of the step, set the statistics to the mean over its micro-batches."""
        self._set(self._means)

    @torch.no_grad()
    def count(self, completed_steps: int) -> None:
        """Set the layers' counters, which count passes, to the steps, before they are used or saved."""
        for layer in self._layers:
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(completed_steps)

    @torch.no_grad()
    def average(self, world_size: int, completed_steps: int) -> None:
        """Average the statistics over all processes, with one reduction, before they are used."""
        self.count(completed_steps)
        buffers = [*self._buffers(), *self.averages.values()]
        if world_size == 1 or not buffers:
            return
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        torch.distributed.all_reduce(flat)
        flat /= world_size
        for buffer, values in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def remember(self) -> None:
        self._before = self._copied()

    def restore(self) -> None:
        """Set the statistics back to their values at the last `remember`."""
        self._set(self._before)

    @torch.no_grad()
    def _copied(self) -> list[torch.Tensor]:
        buffers = self._buffers()
        # A clone each would launch a kernel each.
        return list(torch._foreach_mul(buffers, 1.0)) if buffers else []

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        if values:
            torch._foreach_copy_(self._buffers(), values)

    def _buffers(self) -> list[torch.Tensor]:
        return [getattr(layer, kind) for layer, kind in self._places.values()]


def synchronize(model: nn.Module, device: torch.device) -> None:
    """Make each of torch's BatchNorm layers in a model normalize over all processes when it is trained on `device`.

    Layers become torch's `SyncBatchNorm` or, on CPUs, `CpuSyncBatchNorm`. As in torch's `fully_shard`, they change
    their class and remain the same objects, which others already hold, as they hold their parameters and buffers.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = CpuSyncBatchNorm if device.type == "cpu" else nn.SyncBatchNorm
            # As the constructor of torch's sets it: all processes.
            vars(module)["process_group"] = None


class CpuSyncBatchNorm(_BatchNorm):
    """BatchNorm over all processes' inputs together in training, for CPUs, which torch's `SyncBatchNorm` refuses.

    Every process must run it equally often, forward and backward; inputs may differ in size. Each process gets the
    gradient of the sum of all processes' losses, because the gradient of torch's differentiable `all_reduce` is summed
    over the processes, too.
    """

    _check_input_dim = nn.SyncBatchNorm._check_input_dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[misc]
        # bfloat16 would keep only 8 bits of a mean.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        channels = (1, -1, *[1] * (values.dim() - 2))
        others = [dim for dim in range(values.dim()) if dim != 1]
        count = _sum_over_processes(values.new_tensor(values.numel() // values.size(1)))
        if count <= 1:
            raise ValueError("BatchNorm needs more than one value per channel over all processes in training")
        mean = _sum_over_processes(values.sum(others)) / count
        # Squared deviations from the common mean, because E[x^2] - E[x]^2 cancels if the mean is large.
        deviations = values - mean.view(channels)
        variance = _sum_over_processes(deviations.square().sum(others)) / count
        # `RunningStatistics` has refused a momentum of None.
        if self.running_mean is not None and self.running_var is not None and self.momentum is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            unbiased_variance = variance.detach() * count / (count - 1)
            self.running_mean.mul_(1 - self.momentum).add_(mean.detach(), alpha=self.momentum)
            self.running_var.mul_(1 - self.momentum).add_(unbiased_variance, alpha=self.momentum)
        output = deviations * torch.rsqrt(variance + self.eps).view(channels)
        if self.weight is not None:
            output = output * self.weight.view(channels)
        if self.bias is not None:
            output = output + self.bias.view(channels)
        return output.to(input.dtype)


def _sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return total
