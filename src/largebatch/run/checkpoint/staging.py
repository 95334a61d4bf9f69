"""Memory on the host into which a checkpoint's tensors are copied, so that training may change the originals."""

import mmap
import weakref
from contextlib import suppress
from math import ceil, inf, prod
from pathlib import Path

import torch

from largebatch.errors import UserError
from largebatch.storage.tensors import Shapes

# The size of a cache line in bytes, and a multiple of every dtype's size.
ALIGNMENT = 64
# Page-locked for all of the process's CUDA contexts: `cudaHostRegisterPortable`.
PORTABLE = 1


class Staging:
    """One buffer for all tensors, kept from one checkpoint to the next, and exchanged only for a larger one.

    Args:
        page_locked: Whether a GPU copies into it, which is asynchronous only if its pages cannot move. They are locked
            by CUDA's runtime, because torch's allocator of pinned memory rounds sizes up to powers of two unless an
            environment variable says otherwise, and keeps what is freed.
    """

    def __init__(self, page_locked: bool):
        self._page_locked = page_locked
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def tensors(self, shapes: Shapes, available: float = inf) -> dict[str, torch.Tensor]:
        """Uninitialized tensors of these dtypes and shapes, by name; they share memory with those of earlier calls.

        Raises:
            UserError: The host has too little memory, or it is more than the `available` bytes.
        """
        places = {}
        end = 0
        for name, (dtype, shape) in shapes.items():
            size = prod(shape) * dtype.itemsize
            places[name] = slice(end, end + size)
            end += ceil(size / ALIGNMENT) * ALIGNMENT
        if end > self._buffer.numel():
            # The old one is freed first.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = self._allocate(end, available)
        return {name: self._buffer[places[name]].view(dtype).view(shape) for name, (dtype, shape) in shapes.items()}

    def _allocate(self, size: int, available: float) -> torch.Tensor:
        try:
            if size > available:
                # The system would let the process have it, and end the process when it uses it.
                raise MemoryError(f"{available / 2**30:.2f} GiB are available to each process")
            if not self._page_locked:
                return torch.empty(size, dtype=torch.uint8)
            return _page_locked(size)
        except (OSError, RuntimeError, MemoryError) as error:
            raise UserError(
                f"no host memory for {size / 2**30:.2f} GiB of an asynchronous checkpoint: {error}; give the job more "
                "(with Slurm, --mem=0 is a node's whole memory), or set checkpoint.asynchronous to false"
            ) from error


def available_memory(root: Path = Path("/")) -> int:
    """The bytes that the system, and the limits of the job's control groups (version 2), have left for new memory."""
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    _, _, group = (root / "proc/self/cgroup").read_text().rpartition("0::/")
    for level in (root / "sys/fs/cgroup" / group.strip() / "memory.max").parents:
        # Those without a limit have "max" in the file, or no file.
        with suppress(OSError, ValueError):
            limit = int((level / "memory.max").read_text())
            used = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
            # Files in memory can be dropped.
            available.append(limit - int(used["anon"]) - int(used["shmem"]))
    return min(available)


def _page_locked(size: int) -> torch.Tensor:
    """Bytes whose pages stay locked until they are freed; RuntimeError if CUDA refuses, OSError if the system does."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not for loader processes: a fork would copy locked pages at once.
    memory.madvise(mmap.MADV_DONTFORK)
    # Zeros, so that torch's threads map the pages: the driver would do so in one thread, with its locks held.
    buffer = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), size, PORTABLE))
    if code:
        raise RuntimeError(f"cudaHostRegister returned error {code}")

    def unlock(address: int, _still_mapped: mmap.mmap) -> None:
        runtime.cudaHostUnregister(address)

    end = weakref.finalize(buffer.untyped_storage(), unlock, buffer.data_ptr(), memory)
    # The end of the process unlocks them, without waiting for the GPU.
    end.atexit = False
    return buffer
