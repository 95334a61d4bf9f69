"""What CUDA's kernels keep, on CPU tensors: bytes worked out by hand."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from largebatch.estimate import cuda_kernels as kernels


def saved_by(compute, *, in_bf16=True):
    """The bytes of each storage that autograd saves; `compute` makes its tensors itself."""
    storages = {}

    def keep(tensor):
        storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        return tensor

    cuda = kernels.cuda_kernels(in_bf16)
    with FakeTensorMode(), saved_tensors_hooks(keep, lambda tensor: tensor), cuda:
        compute()
    return sorted(storage.nbytes() for storage in storages.values())


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def test_grouped_attention_in_fp32_keeps_probabilities():
    def attention():
        F.scaled_dot_product_attention(
            tensor(2, 8, 64, 32), tensor(2, 2, 64, 32), tensor(2, 2, 64, 32), is_causal=True, enable_gqa=True
        )

    assert 4 * 2 * 8 * 64 * 64 in saved_by(attention, in_bf16=False)


def test_dropout_keeps_booleans():
    def dropout():
        nn.Dropout(0.1)(tensor(1000) * 1)

    assert saved_by(dropout, in_bf16=False) == [1000]
