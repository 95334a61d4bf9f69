"""Tensors that count how often they are copied to the host."""

import torch

READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "to")}


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU, as does what is computed from it: `cpu` is counted, and nothing else reads it."""

    transfers = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        assert function not in READS, function
        result = super().__torch_function__(function, types, arguments, keywords or {})
        if function is torch.Tensor.cpu:
            OnDevice.transfers += 1
            return result.as_subclass(torch.Tensor)
        return result


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one on a GPU; the count starts over."""
    OnDevice.transfers = 0
    return tensor.as_subclass(OnDevice)
