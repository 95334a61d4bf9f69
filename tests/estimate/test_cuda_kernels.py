"""What CUDA's kernels keep, on CPU tensors: torch's own lists, and bytes worked out by hand."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import autocast_lists
from largebatch.estimate import cuda_kernels as kernels

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


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


def test_the_tables_are_torchs_lists():
    assert autocast_lists.differences() == []


def test_a_missing_operation_is_found(monkeypatch):
    monkeypatch.setattr(kernels, "FP32", [name for name in kernels.FP32 if name != "exp"] + ["cosh.made_up"])
    assert autocast_lists.differences() == [
        "FP32: cosh.made_up is only in the table",
        "FP32: exp is only in torch's list",
        "cosh.made_up has no autocast on CUDA",
        "exp has autocast on CUDA, and is in no table",
    ]


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        (lambda _, wide: F.linear(wide, wide), BF16),
        (lambda low, wide: torch.einsum("ij,jk", low, wide), BF16),
        (lambda low, _: low**2, FP32),
        (lambda low, _: low.exp(), FP32),
        (lambda low, _: low.softmax(-1), FP32),
        (lambda low, _: low.softmax(-1, dtype=FP64), FP64),
        (lambda low, _: F.layer_norm(low, (4,)), FP32),
        (lambda low, _: low.sum(), FP32),
        (lambda low, _: low.norm(), FP32),
        (lambda low, _: low.norm(dim=1), FP32),
        (lambda low, _: F.cross_entropy(low, torch.zeros(4, dtype=torch.int64)), FP32),
        (lambda low, wide: torch.addcmul(low, low, wide), FP32),
        (lambda low, _: torch.tensordot(low, low), BF16),
        # In a list of the CPU's alone, or in none.
        (lambda low, _: torch.stack([low, low]), BF16),
        (lambda low, _: F.gelu(low), BF16),
        (lambda low, wide: low.double() @ wide.double(), FP64),
    ],
)
def test_dtypes_of_results(compute, dtype):
    with kernels.cuda_kernels(in_bf16=True):
        assert compute(torch.ones(4, 4, dtype=BF16), torch.ones(4, 4)).dtype == dtype


def test_nothing_is_left_behind():
    def on_cpu():
        with torch.autocast("cpu", BF16):
            low = torch.ones(4, 4, dtype=BF16)
            return (low**2).dtype, (low.mm(low.float())).dtype, F.mse_loss(low, low).dtype, low.exp().dtype

    before = on_cpu()
    with kernels.cuda_kernels(in_bf16=True):
        assert on_cpu() != before
    assert on_cpu() == before


def test_a_gelu_made_of_powers_keeps_fp32():
    """GPT-2's, on 1,000 numbers in bfloat16: inputs of the products by 0.5 x and (1 + tanh), of pow, and tanh's result
    are all fp32 where pow has made them so."""

    def gelu_new():
        x = F.linear(tensor(10, 10), tensor(100, 10))
        0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))

    # The linear layer's two inputs in bf16; 0.5 x in bf16; in fp32: the copy for pow, tanh's result, 1 + tanh.
    assert saved_by(gelu_new) == sorted([2 * 100, 2 * 1000, 2 * 1000, 4 * 1000, 4 * 1000, 4 * 1000])


def test_a_weight_used_twice_is_cast_twice():
    def twice():
        weight = tensor(10, 10)
        F.linear(F.linear(tensor(3, 10), weight), weight)

    # The inputs of both products, in bf16.
    inputs = [2 * 30, 2 * 30]
    assert saved_by(twice) == sorted([*inputs, 2 * 100, 2 * 100])


Q, KV, ROWS = 2 * 8 * 64 * 32, 2 * 2 * 64 * 32, 2 * 8 * 64


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
        q, k, v = tensor(2, 8, 64, 32), tensor(2, kv_heads, 64, 32), tensor(2, kv_heads, 64, 32)
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
