"""Training metrics: gathered at log points only, so that no step waits for the device in between."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from largebatch.backend.base import Backend
from largebatch.errors import TrainingFailed
from largebatch.plan import RunPlan


@dataclass(frozen=True)
class LoggedStep:
    """The numbers of one optimizer step."""

    step: int
    """Optimizer steps completed."""
    samples: int
    """Training samples seen."""
    epoch: float
    """Passes over the training set."""
    loss: float
    """Mean loss over the global batch of this step, before its update."""
    lr: float
    """Learning rate of this step, as the optimizer had it."""
    grad_norm: float | None
    """Global norm of this step's gradient, before clipping."""
    global_batch_size: int
    """Samples of this step."""
    samples_per_second: float
    """Since the last logged step, over all processes, evaluation left out."""
    tokens_per_second: float | None
    seconds: float
    """Time in training since its start, evaluation left out."""


class Stopwatch:
    """Seconds of training, without the pauses."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Start, or go on after a pause."""
        if self._started is None:
            self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop counting until `start`."""
        self._elapsed = self.seconds
        self._started = None

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._elapsed + running


class StepMetrics:
    """Collects the losses of steps on the device, and turns them into numbers when a step is logged."""

    def __init__(self, backend: Backend, plan: RunPlan):
        self._backend = backend
        self._plan = plan
        self._loss_sums: list[torch.Tensor] = []
        self._weight = 0
        self._logged_samples = 0
        self._logged_weight = 0
        self._logged_seconds = 0.0
        self.total_weight = 0
        """Samples or target tokens, whichever the loss is a mean over, of all steps so far."""
        self.stopwatch = Stopwatch()

    def is_logged(self, step: int) -> bool:
        """Whether a step, counted from 1, gets a line: the first, the last and every `log_every_steps`-th."""
        return step % self._plan.log_every_steps == 0 or step in (1, self._plan.stop_after_steps)

    def add(self, loss_sum: torch.Tensor, weight: int) -> None:
        """Take the numbers of the next step.

        Args:
            loss_sum: This process's sum of losses, a scalar on the device; it is not waited for.
            weight: What the sum over all processes is divided by.
        """
        self._loss_sums.append(loss_sum)
        self._weight = weight
        self.total_weight += weight

    def log(self, step: int, grad_norm: torch.Tensor | None) -> LoggedStep:
        """The numbers of step `step`, counted from 1, over all processes.

        Raises:
            TrainingFailed: A loss since the last logged step, or this step's gradient, is not finite; every process
                raises it.
        """
        plan = self._plan
        loss = math.fsum(self._gather_losses(step)) / self._weight
        measured_norm = None if grad_norm is None else float(grad_norm)
        if measured_norm is not None and not math.isfinite(measured_norm):
            raise _not_finite(f"the gradient's norm is {measured_norm} at step {step} (the loss was {loss:.6g})")

        seconds = self.stopwatch.seconds
        place = place_of(plan, step)
        elapsed = max(seconds - self._logged_seconds, 1e-9)
        samples_per_second = (place["samples"] - self._logged_samples) / elapsed
        weight_per_second = (self.total_weight - self._logged_weight) / elapsed
        self._logged_samples, self._logged_weight = place["samples"], self.total_weight
        self._logged_seconds = seconds
        return LoggedStep(
            **place,
            loss=loss,
            lr=self._backend.learning_rate,
            grad_norm=measured_norm,
            global_batch_size=plan.batch_at(step - 1).size,
            samples_per_second=round(samples_per_second, 3),
            tokens_per_second=round(weight_per_second, 3) if plan.loss_unit == "tokens" else None,
            seconds=round(seconds, 3),
        )

    def check(self, step: int) -> None:
        """Raise TrainingFailed if a loss of the steps up to `step` that were not logged yet is not finite."""
        if self._loss_sums:
            self._gather_losses(step)

    def _gather_losses(self, step: int) -> list[float]:
        """Each process's sum of losses of step `step`, the last one added; all since the last call must be finite."""
        window = torch.stack(self._loss_sums).double()
        self._loss_sums.clear()
        finite = torch.isfinite(window)
        first_bad = torch.where(finite.all(), -1, finite.int().argmin())
        numbers = self._backend.all_gather(torch.stack([window[-1], first_bad.double(), window[first_bad]])).tolist()
        bad = [(int(index), rank, value) for rank, (_, index, value) in enumerate(numbers) if index >= 0]
        if bad:
            index, rank, value = min(bad)
            raise _not_finite(f"the loss is {value} at step {step - len(window) + 1 + index} on rank {rank}")
        return [loss_sum for loss_sum, _, _ in numbers]


def place_of(plan: RunPlan, step: int) -> dict[str, Any]:
    """Where training is after `step` steps: "step", "samples" trained on and "epoch"."""
    return {
        "step": step,
        "samples": plan.batch_at(step).samples_before,
        "epoch": round(float(plan.timeline.progress(step, "epochs")), 6),
    }


def _not_finite(what: str) -> TrainingFailed:
    error = TrainingFailed(
        f"{what}; training stopped and no weights were written. Try a longer learning_rate.warmup, a lower "
        "learning_rate.base_lr, or optimizer.clip_norm, and look at the data of that step"
    )
    error.everywhere = True
    return error
