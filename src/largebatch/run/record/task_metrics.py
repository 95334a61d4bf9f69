"""Training metrics of the task's own: kept on the device until their step is logged, and then summed over processes."""

from collections import defaultdict
from collections.abc import Mapping
from numbers import Real

import torch

from largebatch.backend.base import Backend
from largebatch.errors import UserError

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
            known = self.values.get(name, (0.0,) * len(parts))
            are_numbers = all(isinstance(part, Real) or getattr(part, "shape", None) == () for part in parts)
            if not are_numbers or len(parts) not in (1, 2) or len(parts) != len(known):
                raise UserError(
                    f"run.log: {name!r} is {value}; log a number, or a pair of numbers (sum, weight), and always the "
                    "same kind under one name"
                )
            # Copies, because values outlive the step's graph and the weights that FSDP gathers for it. In double
            # precision, because sums in bf16 could not count beyond 256.
            copies = tuple(
                part.detach().to(torch.double, copy=True) if isinstance(part, torch.Tensor) else float(part)
                for part in parts
            )
            if len(copies) == 1:
                self.values[name] = copies
            elif contributes:
                self.values[name] = tuple(total + part for total, part in zip(known, copies, strict=True))

    def over_processes(self, backend: Backend) -> dict[str, float]:
        """The means of pairs, except of those that weigh nothing, and the main process's last values."""
        mine = {name: [float(part) for part in parts] for name, parts in self.values.items()}
        by_name = defaultdict(list)
        for logged in backend.gather_objects(mine):
            for name, parts in logged.items():
                by_name[name].append(parts)
        result = {}
        for name, found in by_name.items():
            if len(found[0]) == 1:
                result[name] = found[0][0]
                continue
            totals, weights = zip(*found, strict=True)
            if sum(weights):
                result[name] = sum(totals) / sum(weights)
        return result
