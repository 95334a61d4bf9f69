"""The GPU of a process, without one: its index is known, and its generator seeded."""

from types import SimpleNamespace

import pytest
import torch

from cuda_recorder import DEVICE, CudaRecorder
from largebatch.backend.launch import Launch
from largebatch.backend.native import DdpBackend


def backend_on(device):
    accelerator = SimpleNamespace(
        device=torch.device(device), process_index=0, num_processes=1, is_local_main_process=True
    )
    return DdpBackend(accelerator, Launch("single", 0, 1, 1), SimpleNamespace(micro_batch_size=1))


@pytest.mark.parametrize(("given", "expected"), [("cuda", "cuda:0"), ("cuda:3", "cuda:3"), ("cpu", "cpu")])
def test_a_gpu_has_an_index(given, expected):
    """Accelerate's device has none in a process without a launcher, and such a device cannot be selected."""
    with CudaRecorder() as gpu:
        backend = backend_on(given)
        assert backend.device == torch.device(expected)
        if given != "cpu":
            torch.cuda.set_device(backend.device)
            assert gpu.log == [f"set_device({backend.device.index})"]


@pytest.mark.parametrize(("device", "log"), [(DEVICE, ["manual_seed(7)"]), ("cpu", [])])
def test_the_generators_of_the_host_and_of_the_gpu_are_seeded(device, log):
    with CudaRecorder() as gpu, torch.random.fork_rng(devices=[]):
        backend_on(device).seed(7)
        assert torch.default_generator.initial_seed() == 7
    assert gpu.log == log
