"""The memory of a GPU: how `--gpu-memory` gives it, and how much of it a plan leaves free."""

import argparse

from largebatch.tools.options import memory

GIB = 2**30

KNOWN_GPUS = {
    "v100-32gb": 31.7,
    "a100-40gb": 39.4,
    "a100-80gb": 79.1,
    "l40s": 44.4,
    "h100-80gb": 79.1,
    "h100-nvl": 93.0,
    "h200": 139.7,
    "b200": 178.3,
}
"""GiB that torch reports as `total_memory`; it differs by up to 0.2 between drivers, and this is the least."""


def gpu_memory(text: str) -> int:
    """Return the bytes of a known GPU, or of a number of GiB."""
    name = text.strip().lower()
    if name in KNOWN_GPUS:
        return round(KNOWN_GPUS[name] * GIB)
    try:
        return memory(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor a known GPU: {', '.join(KNOWN_GPUS)}; write GiB") from error


def kept_back(memory_bytes: int) -> int:
    """Bytes that a plan leaves free: for CUDA's context, NCCL, work space and the allocator's fragmentation."""
    return max(4 * GIB, memory_bytes * 8 // 100)
