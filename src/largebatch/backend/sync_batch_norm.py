"""BatchNorm over the micro-batches of all processes, on GPUs and in CPU rehearsal.

On GPUs this is torch's `SyncBatchNorm`, which refuses tensors of the CPU (and so does DDP, for models that have it);
there it is `CpuSyncBatchNorm`, of the same meaning.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class CpuSyncBatchNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of all processes' inputs together.

    Every process must run it equally often, forward and backward; inputs may differ in size. The gradient that each
    process gets is the one of the sum of all processes' losses.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        # bfloat16 would keep 8 bits of a mean.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        channels = (1, -1, *[1] * (values.dim() - 2))
        others = [dim for dim in range(values.dim()) if dim != 1]
        count = _sum_over_processes(values.new_tensor(values.numel() // values.size(1)))
        if count <= 1:
            raise ValueError("BatchNorm needs more than one value per channel over all processes in training")
        mean = _sum_over_processes(values.sum(others)) / count
        # The squares of deviations from the common mean: E[x^2] - E[x]^2 would cancel where the mean is large.
        deviations = values - mean.view(channels)
        variance = _sum_over_processes(deviations.square().sum(others)) / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        output = deviations * torch.rsqrt(variance + self.eps).view(channels)
        if self.weight is not None:
            output = output * self.weight.view(channels)
        if self.bias is not None:
            output = output + self.bias.view(channels)
        return output.to(input.dtype)

    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # `RunningStatistics` has refused None.
        assert self.momentum is not None
        self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
        self.running_var.mul_(1 - self.momentum).add_(unbiased_variance, alpha=self.momentum)
        self.num_batches_tracked.add_(1)


def synchronize(model: nn.Module, device: torch.device) -> None:
    """Make each BatchNorm layer normalize over all processes, in place.

    Layers stay the objects they are, with their parameters (which an optimizer holds already), buffers and names.

    Args:
        model: Its BatchNorm layers are torch's own.
        device: Where it will be trained.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if device.type == "cpu":
                module.__class__ = CpuSyncBatchNorm
            else:
                module.__class__ = nn.SyncBatchNorm
                # What its constructor sets: all processes.
                vars(module)["process_group"] = None


def is_synchronized(model: nn.Module) -> bool:
    """Whether the model has BatchNorm layers and all of them normalize over all processes."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return bool(layers) and all(isinstance(layer, (CpuSyncBatchNorm, nn.SyncBatchNorm)) for layer in layers)


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce; what each process puts in moves the results of all, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _sum_over_processes(gradients[0])


def _sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _SumOverProcesses.apply(values)  # type: ignore[no-untyped-call]
    return total
