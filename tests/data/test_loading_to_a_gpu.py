"""Loading onto a GPU, by recorded calls of CUDA: batches are copied from page-locked memory, without waiting."""

import numpy as np
import torch

from cuda_recorder import DEVICE, CudaRecorder
from largebatch.data.loading import load


class Squares:
    """The squares of the indices, and the indices."""

    def __len__(self):
        return 100

    def fetch(self, indices, _epoch):
        return {"square": torch.from_numpy(indices**2), "index": torch.from_numpy(indices)}

    def weight(self, batch):
        return len(batch["index"])


REQUESTS = [(np.array([3, 1]), 0), (np.array([5]), 1)]


def test_no_copy_is_waited_for_by_the_host():
    with CudaRecorder() as gpu:
        batches = [batch for batch, _ in load(Squares(), REQUESTS, 0, DEVICE)]
        copies = ["copy on side stream 1"] * 2
        kept = ["kept for the compute stream"] * 2
        assert gpu.log == [*copies, "the compute stream waits for side stream 1", *kept] * 2
        gpu.compute_stream.synchronize()
    assert [batch["square"].tolist() for batch in batches] == [[9, 1], [25]]
    assert [batch["index"].tolist() for batch in batches] == [[3, 1], [5]]


def test_the_gpu_computes_with_a_batch_when_it_has_been_copied_and_not_after_the_next():
    seen = []
    with CudaRecorder() as gpu:
        for batch, _ in load(Squares(), REQUESTS, 0, DEVICE):
            gpu.launch(lambda batch=batch: seen.append(batch["square"].tolist()))
            gpu.compute_stream.synchronize()
    assert seen == [[9, 1], [25]]
