"""Variants of a step in one process, timed in turns: CUDA events on a GPU, the clock on a CPU."""

import time
from collections.abc import Callable, Mapping

import torch

from gpu.rows import Result
from paired import interleave
from record import Comparison

GIB = 2**30
ROUNDS = 2
STEPS_PER_TURN = 5
WARMUP = 3

Variant = Callable[[], Callable[[], object]]
"""Makes its settings at the beginning of a turn, and returns the step."""


def device() -> torch.device:
    """The first GPU, or the CPU without one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def in_turns(case: str, baseline: str, variants: Mapping[str, Variant]) -> list[Result]:
    """Seconds per step of each variant, and the memory that its step takes beyond what is there before."""
    peaks: dict[str, float] = {}
    for variant in variants.values():
        step = variant()
        for _ in range(WARMUP):
            step()

    def measure(name: str) -> float:
        step = variants[name]()
        # The first step after another variant may choose algorithms or allocate memory again.
        step()
        seconds, peak = timed(step, STEPS_PER_TURN)
        if peak is not None:
            peaks[name] = max(peak, peaks.get(name, 0.0))
        return seconds

    rounds = interleave([*variants], ROUNDS, measure)
    results: list[Result] = [Comparison("s per step", baseline, rounds, case)]
    if peaks:
        memory = {name: peak / GIB for name, peak in peaks.items()}
        results.append(Comparison("GiB", baseline, [memory], f"{case}: peak beyond the weights"))
    return results


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
