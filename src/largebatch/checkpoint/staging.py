"""Memory on the host into which a checkpoint's tensors are copied, so that training may change the originals."""

import weakref
from math import prod

import torch

from largebatch.errors import TrainingFailed
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

    def tensors(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Uninitialized tensors of these dtypes and shapes, by name; they share memory with those of earlier calls.

        Raises:
            TrainingFailed: The host has too little memory.
        """
        sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if end > self._buffer.numel():
            # The old one is freed first.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = self._allocate(end)
        return {
            name: self._buffer[starts[name] : starts[name] + sizes[name]].view(dtype).view(shape)
            for name, (dtype, shape) in shapes.items()
        }

    def _allocate(self, size: int) -> torch.Tensor:
        try:
            if not self._page_locked:
                return torch.empty(size, dtype=torch.uint8)
            # Zeros, so that torch's threads map the pages: the driver would do so in one thread, with its locks held.
            buffer = torch.zeros(size, dtype=torch.uint8)
            _lock_pages(buffer)
            return buffer
        except RuntimeError as error:
            raise TrainingFailed(
                f"asynchronous checkpoints need {size / 2**30:.2f} GiB of host memory for this process's part of the "
                f"state, which could not be had: {error}; give the job more memory (with Slurm, --mem=0 is all of a "
                "node's), or set checkpoint.asynchronous to false"
            ) from error


def _lock_pages(buffer: torch.Tensor) -> None:
    """Page-lock a tensor's memory until it is freed; RuntimeError if CUDA refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE))
    if code:
        raise RuntimeError(f"cudaHostRegister returned error {code}")
    unlock = weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
    # The end of the process unlocks them, without waiting for the GPU.
    unlock.atexit = False
