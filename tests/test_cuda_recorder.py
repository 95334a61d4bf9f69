"""The recorder of CUDA calls notices a program that does not wait where a GPU would have to be waited for."""

import pytest
import torch

from cuda_recorder import DEVICE, CudaRecorder


@pytest.fixture
def gpu():
    with CudaRecorder() as recorder:
        yield recorder


def copied(gpu, order):
    """A value that the compute stream sets to 1 and later to 2, as a side stream copies it if it is told in this order.

    The copy is right if it is 1.
    """
    value, target = torch.zeros(()), torch.zeros(1).pin_memory()
    gpu.put_on_device(value)
    ready, side = torch.cuda.Event(), torch.cuda.Stream(DEVICE)

    def copy():
        with torch.cuda.stream(side):
            target.copy_(value, non_blocking=True)

    gpu.launch(lambda: value.fill_(1))
    calls = {"record": ready.record, "wait": lambda: side.wait_event(ready), "copy": copy, "end": side.synchronize}
    for name in order.split():
        calls[name]()
    seen = target.item()
    gpu.launch(lambda: value.fill_(2))
    gpu.compute_stream.synchronize()
    side.synchronize()
    return seen, target.item()


def test_in_the_right_order_the_copy_is_right(gpu):
    assert copied(gpu, "record wait copy end") == (1, 1)
    assert gpu.log[:4] == [
        "record on the compute stream",
        "side stream 1 waits",
        "copy on side stream 1",
        "synchronize side stream 1",
    ]


@pytest.mark.parametrize(
    ("order", "seen"),
    [
        ("record copy wait end", (0, 0)),
        ("record copy end", (0, 0)),
        ("wait record copy end", (0, 0)),
        ("wait copy end", (0, 0)),
        ("record wait copy", (0, 2)),
    ],
)
def test_in_a_wrong_order_it_is_not(order, seen, gpu):
    assert copied(gpu, order) == seen


def test_copies_wait_for_pageable_and_scattered_memory(gpu):
    value = torch.arange(4.0)
    gpu.put_on_device(value)
    for target, words in [
        (torch.zeros(4), ", waiting"),
        (torch.zeros(4).pin_memory(), ""),
        (torch.zeros(8).pin_memory()[::2], ", waiting"),
    ]:
        target.copy_(value, non_blocking=True)
        assert gpu.log[-1] == f"copy on the compute stream{words}"
        assert torch.equal(target, value) == bool(words)
        gpu.compute_stream.synchronize()
        assert torch.equal(target, value)


def test_a_device_without_an_index_cannot_be_selected(gpu):
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    torch.cuda.set_device(DEVICE)
    assert gpu.log == ["set_device(0)"]


def test_host_tensors_are_not_touched_and_calls_are_restored():
    copy = torch.Tensor.copy_
    with CudaRecorder() as gpu:
        assert torch.zeros(2).copy_(torch.ones(2)).clone().to("cpu").tolist() == [1, 1]
    assert gpu.log == []
    assert torch.Tensor.copy_ is copy
