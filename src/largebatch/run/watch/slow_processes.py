"""Detects slow ranks: at each evaluation and checkpoint, every rank times one fixed matrix product, and data-loading
times are compared.

In step times, a process that all others wait for looks no slower than they do, so each process measures what it does
alone.
"""

import os
import statistics
import time
from collections.abc import Sequence

import torch

from largebatch.backend.base import Backend
from largebatch.failures import node_name
from largebatch.run.record.recorder import Recorder

SLOW = 1.15  # a rank is slow in a probe if it takes more than this times the median
PROBES_IN_A_ROW = 3
SHARE_OF_STEP = 0.05  # data reading is slow only if it also exceeds the median by more than this share of a step
REPETITIONS = 10


class SlowProcesses:
    """Names ranks that are slow in `PROBES_IN_A_ROW` probes; every process has an instance.

    Args:
        backend: The prepared backend.
        recorder: Gets an event for each slow rank.
    """

    def __init__(self, backend: Backend, recorder: Recorder):
        self._backend, self._recorder = backend, recorder
        self._places = backend.gather_objects(f"{node_name()}, process {os.getpid()}")
        self._last = (0, 0.0, 0.0)  # at the last probe: steps, seconds of training, seconds of waiting for data
        self._streaks: dict[tuple[str, int], int] = {}

    def probe(self, steps: int, seconds: float) -> None:
        """Compare all ranks, and record those that are slow; every process must call this.

        Args:
            steps: Steps taken by this attempt.
            seconds: Seconds that these took.
        """
        now = (steps, seconds, self._recorder.metrics.data_wait)
        count, elapsed, waited = (after - before for after, before in zip(now, self._last, strict=True))
        if self._backend.world_size == 1 or count == 0:
            return
        mine = (seconds_of_product(self._backend.device), waited / count, elapsed / count)
        self._last = now
        numbers = self._backend.all_gather(torch.tensor(mine, dtype=torch.double, device=self._backend.device))
        product, reading, step = numbers.T.tolist()
        slow = {("the matrix product", rank): product for rank in slow_ranks(product, 0.0)}
        min_excess = SHARE_OF_STEP * statistics.median(step)
        slow |= {("data reading", rank): reading for rank in slow_ranks(reading, min_excess)}
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in slow}
        for (what, rank), times in slow.items():
            if self._streaks[what, rank] == PROBES_IN_A_ROW:
                self._name(what, rank, times[rank], statistics.median(times))

    def _name(self, what: str, rank: int, seconds: float, median: float) -> None:
        place = self._places[rank]
        reason = (
            f"rank {rank} ({place}) is slow: {what} took {1000 * seconds:.2f} ms, the median of all processes is "
            f"{1000 * median:.2f} ms, and it was over {SLOW:g} times the median in {PROBES_IN_A_ROW} probes in a row"
        )
        record = self._recorder.record
        record.event("slow_process", record.step, rank=rank, place=place, what=what, reason=reason)
        self._recorder.say(f"WARNING: {reason}")


def slow_ranks(seconds: Sequence[float], min_excess: float) -> list[int]:
    """The ranks that took more than `SLOW` times the median, and `min_excess` seconds more than it."""
    median = statistics.median(seconds)
    return [rank for rank, mine in enumerate(seconds) if mine > SLOW * median and mine - median > min_excess]


def seconds_of_product(device: torch.device) -> float:
    """The shortest of several times of a fixed matrix product; draws no random numbers."""
    # On an H100, 64 products of 17 GFLOP take 2 ms and need 24 MiB; on a CPU core, one of 0.03 GFLOP takes 1 ms.
    # fp16, because GPUs since Volta have tensor cores for it.
    size, products, dtype = (2048, 64, torch.half) if device.type == "cuda" else (256, 1, torch.float)
    matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
    result = torch.empty_like(matrix)
    wait_for_device = torch.get_device_module(device).synchronize
    seconds = []
    for _ in range(REPETITIONS):
        # Earlier work must not delay the products.
        wait_for_device()
        start = time.perf_counter()
        for _ in range(products):
            torch.mm(matrix, matrix, out=result)
        wait_for_device()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
