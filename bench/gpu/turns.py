"""Steps, timed by CUDA events on a GPU, by the clock on a CPU."""

import time
from collections.abc import Callable

import torch

GIB = 2**30


def device() -> torch.device:
    """The first GPU, or the CPU without one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def timed(step: Callable[[], object], steps: int) -> tuple[float, float | None]:
    """Seconds per step, and the bytes of GPU memory at their peak beyond what was allocated before."""
    if device().type == "cpu":
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) / steps, None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / steps, torch.cuda.max_memory_allocated() - before
