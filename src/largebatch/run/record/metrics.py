"""Training metrics: gathered only at log points, so that they do not make other steps wait for the device."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from largebatch.backend.base import Backend
from largebatch.errors import TrainingFailed, UserError
from largebatch.estimate.flops import Utilization
from largebatch.plan import RunPlan
from largebatch.run.record.task_metrics import TaskMetrics


class Stopwatch:
    """Counts seconds of training, without the pauses."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Start, or continue after a pause."""
        if self._started is None:
            self._started = time.perf_counter()

    def pause(self) -> None:
        """Count nothing until `start`."""
        self._elapsed = self.seconds
        self._started = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing during the block, and continue afterward if it was counting before."""
        was_running = self._started is not None
        self.pause()
        yield
        if was_running:
            self.start()

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._elapsed + running


class StepMetrics:
    """Collects the losses of steps on the device, and turns them into numbers when a step is logged.

    Args:
        backend: The prepared backend.
        utilization: The model's operations per sample, and the device's.
        first_step: Steps of earlier attempts.
        seconds: Seconds of training that these took.
    """

    def __init__(self, backend: Backend, utilization: Utilization, first_step: int, seconds: float):
        self._backend = backend
        self._plan = backend.plan
        self._loss_sums: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._utilization = utilization
        self._earlier_seconds, self._earlier_samples = seconds, backend.plan.batch_at(first_step).samples_before
        self._own = TaskMetrics()  # those of the step that was added last
        self._weight = 0.0
        self._total_weight = 0.0
        # Seconds, samples and weight as of the last logged step.
        self._logged = (0.0, self._earlier_samples, 0.0)
        self.stopwatch = Stopwatch()

    def is_logged(self, step: int) -> bool:
        """Whether a step, counted from 1, gets a line: the first, the last and every `log_every_steps`-th."""
        return step % self._plan.logging.every == 0 or step in (1, self._plan.stop_after_steps)

    def add(
        self, step: int, loss_sum: torch.Tensor, weight: float, grad_norm: torch.Tensor | None, own: TaskMetrics
    ) -> None:
        """Take the numbers of the next step, counted from 1, without waiting for the device.

        `loss_sum` is this process's, and `weight` that of the global batch, which divides the sum over all processes.
        `own` is what the task has logged in the step.
        """
        self._loss_sums[step] = loss_sum
        if grad_norm is not None:
            self._norms[step] = grad_norm
        self._weight, self._own = weight, own
        self._total_weight += weight

    def leave_out(self, step: int) -> None:
        """Exclude a step that was not taken from the metrics."""
        del self._loss_sums[step]
        self._norms.pop(step, None)

    def log(self, step: int) -> dict[str, Any]:
        """The line of metrics.jsonl for `step`, the last one added, over all processes; fails as `check` does.

        Loss and gradient norm are those of this step alone, before its update and before clipping; rates are those
        since the line before. Seconds are those in training since the run's start, with repeated steps counted once.
        """
        plan = self._plan
        norm = self._norms.get(step)
        losses, has_own = self._gather_losses(step)
        loss = math.fsum(losses) / self._weight
        place, seconds = place_of(plan, step), self.stopwatch.seconds
        earlier_seconds, earlier_samples, earlier_weight = self._logged
        self._logged = (seconds, place["samples"], self._total_weight)
        elapsed = max(seconds - earlier_seconds, 1e-9)
        rate = (place["samples"] - earlier_samples) / elapsed
        in_tokens = plan.loss_unit == "tokens"
        line = {
            **place,
            "loss": loss,
            "lr": self._backend.learning_rate,
            "grad_norm": None if norm is None else float(norm),
            "global_batch_size": plan.batch_at(step - 1).size,
            "samples_per_second": round(rate, 3),
            "tokens_per_second": round((self._total_weight - earlier_weight) / elapsed, 3) if in_tokens else None,
            "mfu": self._utilization.at(rate),
            "seconds": round(self._earlier_seconds + seconds, 3),
        }
        line = {name: value for name, value in line.items() if value is not None}
        own = self._own.over_processes(self._backend) if has_own else {}
        if taken := own.keys() & line.keys():
            raise UserError(f"run.log: each line has a {min(taken)!r} already; choose another name", everywhere=True)
        return line | own

    def summary(self, step: int) -> dict[str, Any]:
        """What summary.json says of speed after `step` steps; rates are those of this attempt."""
        seconds = max(self.stopwatch.seconds, 1e-9)
        samples = self._plan.batch_at(step).samples_before
        rate = (samples - self._earlier_samples) / seconds
        in_tokens = self._plan.loss_unit == "tokens"
        return {
            "steps": step,
            "planned_steps": self._plan.total_steps,
            "samples": samples,
            "train_seconds": round(self._earlier_seconds + self.stopwatch.seconds, 3),
            "samples_per_second": round(rate, 3),
            "world_size": self._plan.world_size,
            **({"tokens_per_second": round(self._total_weight / seconds, 3)} if in_tokens else {}),
            "mfu": self._utilization.at(rate),
            "mfu_convention": self._utilization.convention,
        }

    def check(self, step: int) -> None:
        """Raise TrainingFailed on all processes if a loss or norm since the last logged step is not finite."""
        if self._loss_sums:
            self._gather_losses(step)

    def _gather_losses(self, step: int) -> tuple[list[float], bool]:
        """Each process's sum of losses in `step`, the last one added; all since the last call must be finite.

        And whether any process has logged metrics of the task's own in that step.
        """
        steps = list(self._loss_sums)
        window = torch.stack(list(self._loss_sums.values())).tolist()
        self._loss_sums.clear()
        first_bad = next((index for index, loss_sum in enumerate(window) if not math.isfinite(loss_sum)), -1)
        mine = (window[-1], first_bad, window[first_bad], len(self._own.values))
        numbers = self._backend.all_gather(torch.tensor(mine, dtype=torch.double, device=self._backend.device)).tolist()
        bad = [(int(index), rank, value) for rank, (_, index, value, _) in enumerate(numbers) if index >= 0]
        if bad:
            index, rank, value = min(bad)
            raise _not_finite(f"the loss is {value} at step {steps[index]} on rank {rank}")
        norms, self._norms = self._norms, {}
        for bad_step, norm in zip(norms, torch.stack([*norms.values()]).tolist() if norms else [], strict=True):
            if not math.isfinite(norm):
                loss = math.fsum(row[0] for row in numbers) / self._weight
                what = f" (the loss was {loss:.6g})" if bad_step == step else ""
                raise _not_finite(f"the gradient's norm is {norm} at step {bad_step}{what}")
        return [row[0] for row in numbers], any(row[3] for row in numbers)


def place_of(plan: RunPlan, step: int) -> dict[str, Any]:
    """The progress of training after `step` steps: "step", "samples" trained on and, where there are such, "epoch"."""
    place: dict[str, Any] = {"step": step, "samples": plan.batch_at(step).samples_before}
    return place if plan.mixture else place | {"epoch": round(float(plan.timeline.progress(step, "epochs")), 6)}


def _not_finite(what: str) -> TrainingFailed:
    return TrainingFailed(
        f"{what}; training stopped and no weights were written. Try a longer learning_rate.warmup, a lower "
        "learning_rate.base_lr, or optimizer.clip_norm, and look at the data of that step; faults.on_non_finite can "
        "skip such steps",
        everywhere=True,
    )
