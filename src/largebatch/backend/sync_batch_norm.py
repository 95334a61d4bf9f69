"""BatchNorm layers that normalize over the inputs of all processes together."""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


class _OverProcesses(_BatchNorm):
    """BatchNorm over all processes' inputs together in training; in evaluation mode, torch's own.

    Every process must run it equally often, forward and backward; inputs may differ in size. Each process gets the
    gradient of the sum of all processes' losses.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        return self._normalize(input)

    @abstractmethod
    def _normalize(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize in training; raise ValueError for a single value per channel over all processes."""


class CpuSyncBatchNorm(_OverProcesses):
    """For CPU tensors, which torch's `SyncBatchNorm`, and DDP with it, refuses."""

    def _normalize(self, inputs: torch.Tensor) -> torch.Tensor:
        # bfloat16 would keep only 8 bits of a mean.
        values = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        channels = (1, -1, *[1] * (values.dim() - 2))
        others = [dim for dim in range(values.dim()) if dim != 1]
        count = _sum_over_processes(values.new_tensor(values.numel() // values.size(1)))
        if count <= 1:
            raise ValueError(TOO_FEW_VALUES)
        mean = _sum_over_processes(values.sum(others)) / count
        # Squared deviations from the common mean, because E[x^2] - E[x]^2 cancels if the mean is large.
        deviations = values - mean.view(channels)
        variance = _sum_over_processes(deviations.square().sum(others)) / count
        if self.track_running_stats:
            # `RunningStatistics` has refused a momentum of None.
            assert self.momentum is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            unbiased_variance = variance.detach() * count / (count - 1)
            self.running_mean.mul_(1 - self.momentum).add_(mean.detach(), alpha=self.momentum)
            self.running_var.mul_(1 - self.momentum).add_(unbiased_variance, alpha=self.momentum)
            self.num_batches_tracked.add_(1)
        output = deviations * torch.rsqrt(variance + self.eps).view(channels)
        if self.weight is not None:
            output = output * self.weight.view(channels)
        if self.bias is not None:
            output = output + self.bias.view(channels)
        return output.to(inputs.dtype)


class CudaSyncBatchNorm(_OverProcesses):
    """For GPUs, with torch's kernels and one collective per pass; the host never waits for the GPU.

    torch's own `SyncBatchNorm` leaves out processes with empty inputs by a mask, which the host has to read. Here every
    process must have at least one value per channel, and all together fewer than 2^31, which torch's kernel counts in
    32 bits. Statistics of bfloat16 inputs are in fp32.
    """

    def _normalize(self, inputs: torch.Tensor) -> torch.Tensor:
        count, world_size = inputs.numel() // inputs.size(1), torch.distributed.get_world_size()
        if count == 0:
            raise ValueError(
                f"this process has inputs of shape {tuple(inputs.shape)}, but BatchNorm without waits needs a value in "
                "each process; set compute.sync_batch_norm_without_waits to false"
            )
        # No process has an empty input, so two have two values.
        if count * world_size == 1:
            raise ValueError(TOO_FEW_VALUES)
        if count * world_size >= 2**31:
            raise ValueError(
                f"{world_size} processes with {count} values per channel have 2^31 or more together, which torch's "
                "kernel cannot count; lower batch.micro_batch_size"
            )
        running_mean, running_var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        if self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        inputs = inputs.contiguous(memory_format=_layout(inputs))
        # Only a layer without statistics can have a momentum of None, and does not use it.
        outputs: torch.Tensor = _NormalizeOverProcesses.apply(  # type: ignore[no-untyped-call]
            inputs, self.weight, self.bias, running_mean, running_var, self.momentum or 0.0, self.eps
        )
        return outputs


TOO_FEW_VALUES = "BatchNorm needs more than one value per channel over all processes in training"


def synchronize(model: nn.Module, device: torch.device, without_waits: bool) -> None:
    """Make each of torch's BatchNorm layers in a model normalize over all processes when it is trained on `device`.

    Layers remain the same objects, with their parameters (which an optimizer holds already), buffers and names. Those
    on GPUs become torch's own, or `CudaSyncBatchNorm` if `without_waits`.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if device.type == "cpu":
                module.__class__ = CpuSyncBatchNorm
            elif without_waits:
                module.__class__ = CudaSyncBatchNorm
            else:
                module.__class__ = nn.SyncBatchNorm
                # As its constructor sets it: all processes.
                vars(module)["process_group"] = None


def is_synchronized(model: nn.Module) -> bool:
    """Whether the model has BatchNorm layers and all of them normalize over all processes."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return bool(layers) and all(isinstance(layer, (_OverProcesses, nn.SyncBatchNorm)) for layer in layers)


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce. Each process's input changes the results of all, so its gradient is the sum of their gradients."""

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


class _NormalizeOverProcesses(torch.autograd.Function):
    """The operations of torch's own `SyncBatchNorm` (torch/nn/modules/_functions.py), without its mask."""

    @staticmethod
    def forward(
        context: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        channels = inputs.size(1)
        mean, inverse_std = torch.batch_norm_stats(inputs, eps)
        own = torch.cat([mean, inverse_std, mean.new_full((1,), inputs.numel() // channels)]).unsqueeze(0)
        gathered = own.new_empty(torch.distributed.get_world_size(), own.size(1))
        torch.distributed.all_gather_into_tensor(gathered, own)
        means, inverse_stds, counts = torch.split(gathered, [channels, channels, 1], dim=1)
        counts = counts.flatten()
        # Without running statistics the kernel wants the counts in the type of its first argument, of which it uses
        # nothing else; bfloat16 inputs would have it read them with 8 bits.
        mean, inverse_std = torch.batch_norm_gather_stats_with_counts(
            gathered, means, inverse_stds, running_mean, running_var, momentum, eps, counts
        )
        context.save_for_backward(inputs, weight, mean, inverse_std, counts.to(torch.int32))
        return torch.batch_norm_elemt(inputs, weight, bias, mean, inverse_std, eps)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, mean, inverse_std, counts = context.saved_tensors
        for_inputs, for_weight, for_bias = context.needs_input_grad[:3]
        # The kernels take inputs for channels-last if gradients are.
        gradient = gradients[0].contiguous(memory_format=_layout(inputs))
        *own_sums, weight_gradient, bias_gradient = torch.batch_norm_backward_reduce(
            gradient, inputs, mean, inverse_std, weight, for_inputs, for_weight, for_bias
        )
        input_gradient = None
        if for_inputs:
            sums = torch.cat(own_sums)
            torch.distributed.all_reduce(sums)
            of_gradients, of_products = sums.chunk(2)
            input_gradient = torch.batch_norm_backward_elemt(
                gradient, inputs, mean, inverse_std, weight, of_gradients, of_products, counts
            )
        parameters = weight_gradient if for_weight else None, bias_gradient if for_bias else None
        # None for the statistics, momentum and eps.
        return input_gradient, *parameters, None, None, None, None


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    for layout in (torch.channels_last, torch.channels_last_3d):
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format
