"""Training metrics: gathered at log points only, so that no step waits for the device in between."""

import math
import time
from dataclasses import dataclass

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
    """Learning rate of this step."""
    grad_norm: float | None
    """Global norm of this step's gradient, before clipping."""
    global_batch_size: int
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
        self._logged_step = 0
        self._logged_seconds = 0.0
        self.stopwatch = Stopwatch()

    def is_logged(self, step: int) -> bool:
        """Whether a step, counted from 1, gets a line: the first, the last and every `log_every_steps`-th."""
        return step % self._plan.log_every_steps == 0 or step in (1, self._plan.stop_after_steps)

    def add(self, loss_sum: torch.Tensor) -> None:
        """Take this process's sum of losses of the next step, a scalar on the device; does not wait for it."""
        self._loss_sums.append(loss_sum)

    def log(self, step: int, learning_rate: float, grad_norm: torch.Tensor | None) -> LoggedStep:
        """The numbers of step `step`, counted from 1, over all processes.

        Raises:
            TrainingFailed: A loss since the last logged step, or this step's gradient, is not finite; every process
                raises it.
        """
        plan = self._plan
        window = torch.stack(self._loss_sums).double()
        self._loss_sums.clear()
        finite = torch.isfinite(window)
        first_bad = torch.where(finite.all(), -1, finite.int().argmin())
        norm = torch.full_like(window[-1], math.nan) if grad_norm is None else grad_norm.detach().double()
        mine = torch.stack([window[-1], first_bad.double(), window[first_bad], norm.reshape(())])
        numbers = self._backend.all_gather(mine).tolist()

        self._stop_if_not_finite([(int(row[1]), row[2]) for row in numbers], step, window_size=len(window))
        loss = math.fsum(row[0] for row in numbers) / plan.loss_weight_per_step
        measured_norm = None if grad_norm is None else numbers[0][3]
        if measured_norm is not None and not math.isfinite(measured_norm):
            raise _not_finite(f"the gradient's norm is {measured_norm} at step {step} (the loss was {loss:.6g})")

        seconds = self.stopwatch.seconds
        rate = (step - self._logged_step) * plan.global_batch_size / max(seconds - self._logged_seconds, 1e-9)
        self._logged_step, self._logged_seconds = step, seconds
        return LoggedStep(
            step=step,
            samples=step * plan.global_batch_size,
            epoch=round(step / plan.steps_per_epoch, 6),
            loss=loss,
            lr=learning_rate,
            grad_norm=measured_norm,
            global_batch_size=plan.global_batch_size,
            samples_per_second=round(rate, 3),
            tokens_per_second=round(rate * plan.tokens_per_sample, 3) if plan.tokens_per_sample else None,
            seconds=round(seconds, 3),
        )

    def _stop_if_not_finite(self, first_bad: list[tuple[int, float]], step: int, window_size: int) -> None:
        bad = [(index, rank, value) for rank, (index, value) in enumerate(first_bad) if index >= 0]
        if bad:
            index, rank, value = min(bad)
            raise _not_finite(f"the loss is {value} at step {step - window_size + 1 + index} on rank {rank}")


def _not_finite(what: str) -> TrainingFailed:
    error = TrainingFailed(
        f"{what}; training stopped and no weights were written. Try a longer learning_rate.warmup, a lower "
        "learning_rate.base_lr, or optimizer.clip_norm, and look at the data of that step"
    )
    error.everywhere = True
    return error
