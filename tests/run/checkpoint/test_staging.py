"""The memory for copies: one buffer of the exact size, page-locked for a GPU only, and exchanged only for a larger."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from cuda_recorder import CudaRecorder
from largebatch.run.checkpoint.staging import Staging, available_memory

SHAPES = {
    "weight/a": (torch.float32, (3, 5)),
    "exp_avg/a": (torch.bfloat16, (15,)),
    "buffer/count": (torch.int64, ()),
    "buffer/none": (torch.float64, (0, 4)),
    "buffer/mask": (torch.bool, (129,)),
}
# Each begins at a multiple of 64 bytes: 60, 30, 8, 0 and 129 of them.
BYTES = 64 + 64 + 64 + 0 + 192


@pytest.fixture
def gpu():
    with CudaRecorder() as recorder:
        yield recorder


def test_tensors_do_not_overlap():
    tensors = Staging(page_locked=False).tensors(SHAPES)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == SHAPES
    for number, tensor in enumerate(tensors.values(), 1):
        tensor.fill_(number % 2 if tensor.dtype == torch.bool else number)
    assert [tensor.float().mean().nan_to_num(4).item() for tensor in tensors.values()] == [1, 2, 3, 4, 1]
    first = tensors["weight/a"].data_ptr()
    assert [(tensor.data_ptr() - first) for tensor in tensors.values() if tensor.numel()] == [0, 64, 128, 192]


def test_as_many_bytes_as_needed_are_locked_until_they_are_freed(gpu):
    staging = Staging(page_locked=True)
    assert gpu.locked == {}
    tensors = staging.tensors(SHAPES)
    assert gpu.locked == {tensors["weight/a"].data_ptr(): BYTES}
    del staging
    assert len(gpu.locked) == 1
    del tensors
    assert gpu.locked == {}


def test_memory_is_kept_for_less_and_exchanged_for_more(gpu):
    staging = Staging(page_locked=True)
    address = staging.tensors(SHAPES)["weight/a"].data_ptr()
    less = {name: SHAPES[name] for name in ("exp_avg/a", "buffer/mask")}
    assert staging.tensors(less)["exp_avg/a"].data_ptr() == address
    assert gpu.log == ["lock pages"]
    staging.tensors(SHAPES | {"buffer/more": (torch.int8, (1,))})
    assert list(gpu.locked.values()) == [BYTES + 64]


def test_the_old_memory_is_given_up_before_more_is_taken(gpu, monkeypatch):
    staging = Staging(page_locked=True)
    staging.tensors(SHAPES)
    map_memory, locked = mmap.mmap, []
    monkeypatch.setattr(
        mmap, "mmap", lambda *size, **options: locked.append(len(gpu.locked)) or map_memory(*size, **options)
    )
    staging.tensors(SHAPES | {"buffer/more": (torch.int8, (1,))})
    assert locked == [0]


@pytest.mark.usefixtures("gpu")
def test_forked_processes_get_no_copy_of_locked_memory():
    tensors = Staging(page_locked=True).tensors(SHAPES)
    address = tensors["weight/a"].data_ptr()

    def is_mapped():
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)

    assert is_mapped()
    child = os.fork()
    if child == 0:
        os._exit(is_mapped())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("shapes", [{}, {"buffer/none": SHAPES["buffer/none"]}], ids=["nothing", "empty"])
def test_a_process_that_writes_nothing_locks_nothing(shapes, gpu):
    assert [tensor.shape for tensor in Staging(page_locked=True).tensors(shapes).values()] == [(0, 4)] * len(shapes)
    assert gpu.log == []


def test_without_a_gpu_nothing_is_locked(gpu):
    Staging(page_locked=False).tensors(SHAPES)
    assert gpu.log == []


def test_available_memory(tmp_path):
    """What the system has, or what a control group leaves of its limit; files in memory count as free."""

    def write(place, text):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)

    write("proc/meminfo", "MemTotal:  999 kB\nMemAvailable:      700 kB\nActive(anon): 5 kB\n")
    write("proc/self/cgroup", "1:name=systemd:/\n0::/slurm/job_1/step_0\n")
    assert available_memory(tmp_path) == 700 * 1024
    write("sys/fs/cgroup/slurm/job_1/step_0/memory.max", "max\n")
    write("sys/fs/cgroup/slurm/job_1/memory.max", "90000\n")
    write("sys/fs/cgroup/slurm/job_1/memory.stat", "anon 1000\nfile 80000\nshmem 200\n")
    assert available_memory(tmp_path) == 90000 - 1200
    write("proc/self/cgroup", "4:memory:/process/1\n")
    assert available_memory(tmp_path) == 700 * 1024
