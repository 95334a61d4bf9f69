"""Detects slow ranks: at each evaluation and checkpoint, every rank times one fixed matrix product, and data-loading
times are compared.

In step times, a process that all others wait for looks no slower than they do, so each process measures what it does
alone.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

from largebatch.backend.base import Backend
from largebatch.run.record.recorder import Recorder

T = TypeVar("T")

SLOW = 1.15  # a process is slow in a probe if it takes more than this times the median
PROBES_IN_A_ROW = 3
SHARE_OF_STEP = 0.05  # data reading is slow only if it also exceeds the median by more than this share of a step

REPETITIONS = 10
# 64 products of 17 GFLOP take 2 ms on an H100 and need 24 MiB; on a CPU core, one of 0.03 GFLOP takes 1 ms.
SIZE_ON_GPU, PRODUCTS_ON_GPU = 2048, 64
SIZE_ON_CPU = 256


class Times(NamedTuple):
    """What one process measured."""

    product: float  # seconds of the fixed matrix product
    reading: float  # seconds that reading data took, per step since the last probe
    step: float  # seconds per step since the last probe


class Slow(NamedTuple):
    """A process that was slow in several probes in a row."""

    rank: int
    what: str  # "the matrix product" or "data reading"
    seconds: float  # its time in the last probe
    median: float  # the median time of all processes

    @property
    def ratio(self) -> float:
        """Its time divided by the median."""
        return self.seconds / max(self.median, 1e-9)


class SlowProcesses:
    """Names processes that are slow in `PROBES_IN_A_ROW` probes; every process has an instance.

    Args:
        backend: The prepared backend.
        places: Node and process of every rank, in words.
        recorder: Gets an event for each slow process.
    """

    def __init__(self, backend: Backend, places: Sequence[str], recorder: Recorder):
        self._backend, self._places, self._recorder = backend, places, recorder
        self._clock = own_clock()
        self._reading = 0.0
        self._last = (0, 0.0)
        self._streaks: dict[tuple[int, str], int] = {}

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, while the time that each takes to arrive is counted as data reading."""
        if self._backend.world_size == 1:
            yield from batches
            return
        while True:
            start = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._reading += self._clock() - start
            yield batch

    def name(self, steps: int, seconds: float) -> None:
        """Probe, as `probe`, and record which processes are slow."""
        for slow in self.probe(steps, seconds):
            place = self._places[slow.rank]
            what = (
                f"rank {slow.rank} ({place}) is slow: {slow.what} took {1000 * slow.seconds:.2f} ms, the median of all "
                f"processes is {1000 * slow.median:.2f} ms, and it was over {SLOW:g} times the median in "
                f"{PROBES_IN_A_ROW} probes in a row"
            )
            about = {"rank": slow.rank, "place": place, "what": slow.what, "ratio": round(slow.ratio, 3)}
            self._recorder.record.event("slow_process", self._recorder.step, **about, reason=what)
            self._recorder.say(f"WARNING: {what}")

    def probe(self, steps: int, seconds: float) -> list[Slow]:
        """Compare the processes, all of which call this together, and return those to name.

        Args:
            steps: Steps taken by this attempt.
            seconds: Seconds that these took.
        """
        if self._backend.world_size == 1 or steps == self._last[0]:
            return []
        count, elapsed = steps - self._last[0], seconds - self._last[1]
        mine = Times(seconds_of_product(self._backend.device, self._clock), self._reading / count, elapsed / count)
        self._last, self._reading = (steps, seconds), 0.0
        numbers = torch.tensor(mine, dtype=torch.double, device=self._backend.device)
        everyone = [Times(*times) for times in self._backend.all_gather(numbers).tolist()]
        slow = slow_ones(everyone)
        self._streaks = {(one.rank, one.what): self._streaks.get((one.rank, one.what), 0) + 1 for one in slow}
        return [one for one in slow if self._streaks[one.rank, one.what] == PROBES_IN_A_ROW]


def slow_ones(everyone: Sequence[Times]) -> list[Slow]:
    """The processes that were slow in one probe, given the times of all."""
    slow = []
    step = statistics.median(times.step for times in everyone)
    for what, seconds, least_excess in (
        ("the matrix product", [times.product for times in everyone], 0.0),
        ("data reading", [times.reading for times in everyone], SHARE_OF_STEP * step),
    ):
        median = statistics.median(seconds)
        slow += [
            Slow(rank, what, mine, median)
            for rank, mine in enumerate(seconds)
            if mine > SLOW * median and mine - median > least_excess
        ]
    return slow


def seconds_of_product(device: torch.device, clock: Callable[[], float]) -> float:
    """The shortest of several times of a fixed matrix product, on a CPU by `clock`; draws no random numbers."""
    if device.type == "cuda":
        # fp16, because GPUs since Volta have tensor cores for it. Its own square is the same matrix again.
        matrix = torch.full((SIZE_ON_GPU, SIZE_ON_GPU), 1 / SIZE_ON_GPU, dtype=torch.half, device=device)
        return min(_seconds_on_gpu(matrix, torch.empty_like(matrix)) for _ in range(REPETITIONS))
    matrix = torch.full((SIZE_ON_CPU, SIZE_ON_CPU), 1 / SIZE_ON_CPU, dtype=torch.float, device=device)
    result = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=result)
    seconds = []
    for _ in range(REPETITIONS):
        start = clock()
        torch.mm(matrix, matrix, out=result)
        seconds.append(clock() - start)
    return min(seconds)


def _seconds_on_gpu(matrix: torch.Tensor, result: torch.Tensor) -> float:
    start: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    # Earlier work must not delay the products.
    torch.cuda.synchronize(matrix.device)
    start.record()
    for _ in range(PRODUCTS_ON_GPU):
        torch.mm(matrix, matrix, out=result)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def own_clock() -> Callable[[], float]:
    """A clock of this thread, in seconds, which stands still while other processes have its core.

    If the kernel does not count that, this is the wall clock.
    """
    with suppress(OSError, IndexError, ValueError):
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

        def own() -> float:
            # Nanoseconds on a core, nanoseconds ready and waiting for one, and time slices.
            return (time.perf_counter_ns() - int(os.pread(file, 100, 0).split()[1])) / 1e9

        own()
        return own
    return time.perf_counter
