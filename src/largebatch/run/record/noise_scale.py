"""The gradient noise scale of a run: measurements, which stay on the device until needed, and their average."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from largebatch.backend.base import Backend
from largebatch.batch.noise_scale import WINDOW, is_measurement, measure, noise_scale
from largebatch.storage.files import Line


class NoiseScale:
    """The latest measurements, over which the noise scale is averaged.

    Args:
        backend: The prepared backend.
        earlier: The lines of noise_scale.jsonl of earlier attempts, of which some may be damaged.
        keep: Called with each further line.
    """

    def __init__(self, backend: Backend, earlier: Sequence[Line], keep: Callable[[Line], None]):
        self._backend = backend
        self._plan = backend.plan
        self._keep = keep
        self._pending: dict[int, torch.Tensor] = {}
        self._latest = deque(filter(is_measurement, earlier), WINDOW)

    def add(self, step: int, parts: Sequence[tuple[float, torch.Tensor]], norm: torch.Tensor) -> None:
        """Take this process's `Step.noise_parts` and the norm of the whole gradient, without waiting for the device."""
        shares = math.fsum(share**2 for share, _ in parts)
        squares = torch.stack([square for _, square in parts]).sum()
        # All three become sums over processes.
        numbers = (squares, torch.full_like(squares, shares), norm.double().square() / self._backend.world_size)
        self._pending[step] = torch.stack(numbers)

    def complete(self) -> None:
        """Estimate from what was added, over all processes, and keep the lines."""
        if not self._pending:
            return
        totals = self._backend.all_gather(torch.stack([*self._pending.values()])).sum(0).tolist()
        for step, (squares, shares, square_of_sum) in zip(self._pending, totals, strict=True):
            size = self._plan.batch_at(step - 1).size
            # Otherwise one part has all the weight.
            if shares < 1:
                line = {"step": step, "global_batch_size": size, **measure(squares, square_of_sum, shares, size)}
                self._latest.append(line)
                self._keep(line)
        self._pending.clear()

    def line(self) -> Line:
        """What a logged step's line says; None for what is not known."""
        self.complete()
        found = noise_scale(self._latest)
        return {
            "noise_scale": found.get("samples"),
            "noise_scale_low": found.get("low"),
            "noise_scale_high": found.get("high"),
        }

    def summary(self) -> dict[str, Any]:
        """What summary.json says of it; nothing if the recipe does not ask for it."""
        return {"noise_scale": noise_scale(self._latest)} if self._plan.logging.noise_scale else {}
