"""Training metrics of the task's own: kept on the device until their step is logged, and then summed over processes."""

import math
from collections.abc import Mapping

import torch

from largebatch.backend.base import Backend

Number = torch.Tensor | float
Logged = Number | tuple[Number, Number]
"""The last value of a step, or a pair of sum and weight, whose mean is that of all micro-batches of all processes."""


class TaskMetrics:
    """What a process has logged in one step, by name: sum and weight, or a single number."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Number, ...]] = {}

    def add(self, values: Mapping[str, Logged], contributes: bool) -> None:
        """Take the values of a micro-batch, without waiting for the device; sums count only if it `contributes`."""
        for name, value in values.items():
            parts: tuple[Number, ...] = value if isinstance(value, tuple) else (value,)
            if any(getattr(part, "ndim", 0) for part in parts):
                raise ValueError(f"run.log was given {name!r} with dimensions; log its sum and its weight, or a number")
            if len(parts) > 1 and not contributes:
                continue
            # Sums in bf16 could not count beyond 256. Detached, because values outlive the step's graph.
            parts = tuple(part.detach().double() if isinstance(part, torch.Tensor) else float(part) for part in parts)
            if len(parts) > 1:
                sums = zip(self.values.get(name, (0.0, 0.0)), parts, strict=True)
                parts = tuple(total + part for total, part in sums)
            self.values[name] = parts

    def over_processes(self, backend: Backend) -> dict[str, float]:
        """The means of pairs, except of those that weigh nothing, and the main process's last values."""
        mine = {name: [float(part) for part in parts] for name, parts in self.values.items()}
        everyone = backend.gather_objects(mine)
        result = {}
        for name in dict.fromkeys(name for logged in everyone for name in logged):
            found = [logged[name] for logged in everyone if name in logged]
            if len(found[0]) == 1:
                result[name] = found[0][0]
            elif weight := math.fsum(weight for _, weight in found):
                result[name] = math.fsum(total for total, _ in found) / weight
        return result
