"""Checkpoints of a run on a GPU, by recorded calls of CUDA: what was launched before a save is in it, and no more."""

import pytest
import torch

from cuda_recorder import DEVICE, CudaRecorder
from largebatch.errors import UserError
from largebatch.run.checkpoint import save
from saving import FakeBackend, FakeRun, assert_holds, state_of

BUFFERS = [name for name in state_of(0) if name.startswith("buffer/")]
VECTORS = [name for name, tensor in state_of(0).items() if tensor.numel() and name not in BUFFERS]


class GpuBackend(FakeBackend):
    """Its weights stay where they are, and are on a GPU."""

    device = DEVICE

    def __init__(self, gpu: CudaRecorder):
        super().__init__()
        self.gpu = gpu
        self.state = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        gpu.put_on_device(*self.state.values())

    def launch_step(self, step: int, names: list[str] | None = None) -> None:
        """Let the GPU compute the state after a step, whole or in part, at some time."""
        for name in names or self.state:
            self.gpu.launch(lambda name=name: self.gpu.copy_now(self.state[name], state_of(step)[name]))


@pytest.fixture
def gpu():
    with CudaRecorder() as recorder:
        yield recorder


@pytest.fixture
def run(gpu, tmp_path):
    return FakeRun(tmp_path / "run", asynchronous=True, backend=GpuBackend(gpu))


def test_the_order_of_a_save(gpu, run):
    """The weights are not overwritten before they are copied, and the buffers, which forward passes change, never."""
    gpu.may_select.clear()
    run.backend.launch_step(4)
    run.writer.save(4, 0)
    # The next step's forward pass, which ends before the checkpoint's thread has begun.
    run.backend.launch_step(5, BUFFERS)
    gpu.compute_stream.run()
    gpu.may_select.set()
    run.writer.wait_until_copied()
    gpu.log.append("update")
    run.backend.launch_step(5)
    gpu.compute_stream.run()
    run.writer.wait()
    assert gpu.log == [
        *["clone on the compute stream"] * len(BUFFERS),
        "lock pages",
        "side stream 1 waits for the compute stream",
        "set_device(0)",
        *["copy on side stream 1"] * len(VECTORS + BUFFERS),
        "synchronize side stream 1",
        "update",
    ]
    assert_holds(run.checkpoints / "step_00000004", 4)


def test_memory_is_locked_before_training_and_not_in_a_save(gpu, run):
    run.writer.reserve()
    assert gpu.log == ["lock pages"]
    for step in (4, 8):
        run.backend.launch_step(step)
        run.writer.save(step, 0)
        run.writer.wait()
        assert_holds(run.checkpoints / f"step_{step:08d}", step)
    assert gpu.log.count("lock pages") == 1


def test_a_copy_that_does_not_wait_is_noticed(run, monkeypatch):
    monkeypatch.setattr("cuda_recorder.Stream.wait_stream", lambda *_: None)
    run.backend.launch_step(4)
    run.writer.save(4, 0)
    run.writer.wait()
    with pytest.raises(AssertionError):
        assert_holds(run.checkpoints / "step_00000004", 4)


def test_a_save_that_is_not_asynchronous_waits_for_the_gpu(gpu, tmp_path):
    run = FakeRun(tmp_path / "run", backend=GpuBackend(gpu))
    run.backend.launch_step(4)
    run.writer.save(4, 0)
    run.writer.reserve()
    assert gpu.log == ["copy on the compute stream, waiting"] * len(VECTORS + BUFFERS)
    assert_holds(run.checkpoints / "step_00000004", 4)


def test_too_little_host_memory_is_refused_before_training(gpu, run, monkeypatch):
    """Two processes of the machine need 9 cache lines each."""
    monkeypatch.setattr(save, "available_memory", lambda: 2 * 9 * 64 - 1)
    with pytest.raises(UserError, match=r"no host memory for .* GiB are available to each process; .* to false"):
        run.writer.reserve()
    assert gpu.log == []
    monkeypatch.setattr(save, "available_memory", lambda: 2 * 9 * 64)
    run.writer.reserve()
    assert list(gpu.locked.values()) == [9 * 64]


def test_without_host_memory_the_run_ends_and_says_what_to_do(gpu, run):
    run.writer.last_step = 2
    gpu.lock_error = 2
    with pytest.raises(UserError, match=r"error 2; .* set checkpoint.asynchronous to false"):
        run.writer.save(4, 0)
    # Updates are not held up, and no checkpoint of that step is believed in.
    run.writer.wait_until_copied()
    run.writer.wait()
    assert run.writer.last_step == 2
