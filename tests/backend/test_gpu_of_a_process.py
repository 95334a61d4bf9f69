"""The GPU of a process, without one: its index is known, its generator seeded, and its numbers read together."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cuda_recorder import DEVICE, CudaRecorder
from largebatch.backend.launch import Launch
from largebatch.backend.native import DdpBackend
from largebatch.config.optimizers.adamw import ADAMW
from transfers import OnDevice, on_device


def backend_on(device):
    accelerator = SimpleNamespace(device=torch.device(device), process_index=0, num_processes=1)
    return DdpBackend(accelerator, Launch("single", 0, 1, 1), SimpleNamespace())


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


def test_scalar_states_are_read_in_one_transfer():
    """Adam's step is on the GPU if the optimizer is fused; dtypes may differ, and a state may be no tensor."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["step"] = torch.tensor(2**53 - 1)
    for state in optimizer.state.values():
        state["step"] = on_device(state["step"])
    plan = SimpleNamespace(optimizer_entry=ADAMW, optimizer_options={})
    backend = SimpleNamespace(unwrapped_model=model, _torch_optimizer=optimizer, plan=plan, rank=0, world_size=1)
    parameters = DdpBackend.engine_state(backend).parameters
    assert {name: info.scalars for name, info in parameters.items()} == {
        "weight": {"step": 1.0},
        "bias": {"step": 2.0**53 - 1},
    }
    assert all(type(info.scalars["step"]) is float for info in parameters.values())
    assert OnDevice.transfers == 1
