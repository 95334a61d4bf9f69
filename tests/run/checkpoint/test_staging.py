"""The memory for copies: one buffer of the exact size, exchanged only for a larger; bench/gpu locks its pages."""

import pytest
import torch

from largebatch.errors import UserError
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


def test_tensors_do_not_overlap():
    tensors = Staging(page_locked=False).tensors(SHAPES)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == SHAPES
    first = tensors["weight/a"].data_ptr()
    assert [(tensor.data_ptr() - first) for tensor in tensors.values() if tensor.numel()] == [0, 64, 128, 192]


def test_memory_is_kept_for_less_and_exchanged_for_more():
    staging = Staging(page_locked=False)
    first = staging.tensors(SHAPES)["weight/a"]
    less = {name: SHAPES[name] for name in ("exp_avg/a", "buffer/mask")}
    assert staging.tensors(less)["exp_avg/a"].data_ptr() == first.data_ptr()
    more = staging.tensors(SHAPES | {"buffer/more": (torch.int8, (1,))})["weight/a"]
    assert more.untyped_storage().nbytes() == first.untyped_storage().nbytes() + 64 == BYTES + 64


def test_too_little_host_memory_is_refused_and_says_what_to_do():
    staging = Staging(page_locked=False)
    with pytest.raises(UserError, match=r"no host memory for .* GiB are available to each process; .* to false"):
        staging.tensors(SHAPES, available=BYTES - 1)
    assert staging.tensors(SHAPES, available=BYTES)


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
