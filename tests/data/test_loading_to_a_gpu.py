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


def test_no_copy_is_waited_for():
    requests = [(np.array([3, 1]), 0), (np.array([5]), 1)]
    with CudaRecorder() as gpu:
        batches = [batch for batch, _ in load(Squares(), requests, 0, DEVICE)]
        assert gpu.log == ["copy on the compute stream"] * 4
        gpu.compute_stream.synchronize()
    assert [batch["square"].tolist() for batch in batches] == [[9, 1], [25]]
    assert [batch["index"].tolist() for batch in batches] == [[3, 1], [5]]
