"""What CUDA's kernels keep, on CPU tensors: bytes worked out by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from largebatch.estimate import cuda_kernels as kernels

BF16 = torch.bfloat16
FP32 = torch.float32


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


def tensor(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def test_a_weight_used_twice_is_cast_twice():
    def twice():
        weight = tensor(10, 10)
        F.linear(F.linear(tensor(3, 10), weight), weight)

    # The inputs of both products, in bf16.
    inputs = [2 * 30, 2 * 30]
    assert saved_by(twice) == sorted([*inputs, 2 * 100, 2 * 100])


Q = 2 * 8 * 64 * 32
KV = 2 * 2 * 64 * 32
ROWS = 2 * 8 * 64


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "mask", "expected"),
    [
        # Flash: queries, keys, values, outputs, and a number in fp32 per row.
        (BF16, 8, None, [2 * Q] * 4 + [4 * ROWS]),
        (BF16, 2, None, [2 * Q] * 2 + [2 * KV] * 2 + [4 * ROWS]),
        # Memory-efficient: the same, and a mask of 64 x 64 as numbers.
        (FP32, 8, None, [4 * Q] * 4 + [4 * ROWS]),
        (BF16, 8, (1, 1), [2 * Q] * 4 + [4 * ROWS, 2 * 64 * 64]),
    ],
)
def test_attention_keeps_no_probabilities(dtype, kv_heads, mask, expected):
    def attention():
        q = tensor(2, 8, 64, 32)
        k = tensor(2, kv_heads, 64, 32)
        v = tensor(2, kv_heads, 64, 32)
        seen = None if mask is None else torch.ones(*mask, 64, 64, dtype=torch.bool)
        F.scaled_dot_product_attention(q, k, v, seen, is_causal=mask is None, enable_gqa=kv_heads < 8)

    # Besides them only the state of random numbers, of a few bytes.
    found = [size for size in saved_by(attention, in_bf16=dtype == BF16) if size > 16]
    assert found == sorted(expected)


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


def test_dropout_that_does_nothing_keeps_nothing():
    def dropout():
        nn.Dropout(0.1).eval()(tensor(1000) * 1)
        nn.Dropout(0.0)(tensor(1000) * 1)

    assert saved_by(dropout, in_bf16=False) == []
