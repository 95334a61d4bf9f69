"""The memory of a GPU: how `--gpu-memory` gives it, and how much of it a plan leaves free."""

import argparse

from largebatch.tools.options import memory
from largebatch.tools.plan.hardware import GPUS

GIB = 2**30


def gpu_memory(text: str) -> int:
    """Return the bytes of a known GPU, or of a number of GiB."""
    name = text.strip().lower()
    if found := GPUS.get(name):
        return round(found.memory_gib * GIB)
    try:
        return memory(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor a known GPU: {', '.join(GPUS)}; write GiB") from error


def kept_back(memory_bytes: int) -> int:
    """Bytes that a plan leaves free: for CUDA's context, NCCL, work space and the allocator's fragmentation."""
    return max(4 * GIB, memory_bytes * 8 // 100)
