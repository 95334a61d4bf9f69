"""The kernels of a contender's step, by the time that they take: why one contender is slower than another."""

from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import DeviceType, ProfilerActivity, profile

from gpu.rows import Result
from paired import Contender, TurnClock
from record import Figure

KERNELS = "kernels"
MAX_KERNELS = 25
MAX_CHARACTERS = 100  # of a kernel's name


class Kernel(NamedTuple):
    """All calls of one kernel in a step; on a CPU, of one operation."""

    seconds: float
    calls: float
    name: str


class KernelClock(TurnClock):
    """A clock that can be asked for the kernels of a turn, too."""

    _profiler: profile | None = None

    def begin_turn(self, wish: object) -> None:
        """Watch the turn if it is to tell its kernels."""
        if wish == KERNELS:
            on_gpu = torch.cuda.is_available()
            self._profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
            self._profiler.start()

    def end_turn(self) -> object:
        """Seconds per step, or the kernels of a step."""
        if self._profiler is None:
            return super().end_turn()
        self._profiler.stop()
        kernels = kernels_of_a_step(self._profiler.key_averages(), self._steps)
        self._profiler = None
        return kernels


def kernels_of_a_step(events: EventList, steps: int) -> list[Kernel]:
    """All kernels, the longest first.

    Args:
        events: What a profiler averaged over the calls of each kernel.
        steps: Steps that it watched.
    """
    on_gpu = torch.cuda.is_available()
    kernels = []
    for event in events:
        # Ranges that code names are on the GPU's timeline, too, above the kernels that they consist of.
        if on_gpu and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append(Kernel(microseconds / 1e6 / steps, event.count / steps, event.key))
    return sorted(kernels, reverse=True)


def longest_kernels(title: str, contenders: dict[str, Contender]) -> list[Result]:
    """The time of all kernels of a step of each contender, and a table of the longest."""
    results: list[Result] = []
    for name, contender in contenders.items():
        kernels: list[Any] = contender.ask(KERNELS)
        results.append(Figure(f"{title}, {name}: kernels of a step", "s", [sum(each.seconds for each in kernels)]))
        rows = [
            f"| {each.seconds * 1000:.3f} | {each.calls:g} | {each.name[:MAX_CHARACTERS].replace('|', '/')} |"
            for each in kernels[:MAX_KERNELS]
        ]
        table = [
            f"The longest kernels of a step of {title}, {name}:",
            "",
            "| ms | calls | kernel |",
            "| --- | --- | --- |",
        ]
        results.append("\n".join([*table, *rows]))
    return results
