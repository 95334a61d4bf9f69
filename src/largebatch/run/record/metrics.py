"""Training metrics: gathered only at log points, so that they do not make other steps wait for the device."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from largebatch.backend.base import Backend
from largebatch.data.loading import Loaded
from largebatch.errors import TrainingFailed, UserError
from largebatch.model.flops import Utilization
from largebatch.plan import RunPlan
from largebatch.run.record.task_metrics import TaskMetrics
from largebatch.system.hardware import GIB


class Stopwatch:
    """Counts seconds of training, without the pauses."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._started: float | None = None

    @contextmanager
    def counting(self, is_on: bool) -> Iterator[None]:
        """Count the time of the block, or do not; after it, continue as before."""
        was_on = self._set(is_on)
        try:
            yield
        finally:
            self._set(was_on)

    def _set(self, is_on: bool) -> bool:
        """Count from now on, or do not; whether it counted before."""
        was_on = self._started is not None
        self._elapsed = self.seconds
        self._started = time.perf_counter() if is_on else None
        return was_on

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._elapsed + running


@dataclass
class StepMetrics:
    """Collects the losses of steps on the device, and turns them into numbers when a step is logged."""

    backend: Backend  # the prepared backend
    utilization: Utilization  # the model's operations per sample, and the device's
    first_step: int  # steps of earlier attempts
    earlier_seconds: float  # seconds of training that these took

    def __post_init__(self) -> None:
        self._plan = self.backend.plan
        # By step, since the last logged one: the sum of losses and, where it was computed, the norm of the gradient.
        self._losses: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}
        # Of the step that was added last: what the task has logged, and the weight of the global batch.
        self._own = TaskMetrics()
        self._weight = 0.0
        self._total_weight = 0.0
        # The last logged step, and the seconds and the weight as of then.
        self._logged = (self.first_step, 0.0, 0.0)
        self.stopwatch = Stopwatch()
        self._data_wait = 0.0  # seconds since the last logged step in which this process waited for its next samples

    def timed(self, batches: Iterator[Loaded]) -> Iterator[Loaded]:
        """The same batches, while the time that each takes to arrive is counted as waiting for data."""
        while True:
            start = time.perf_counter()
            # A range in traces of torch's profiler.
            with record_function("data_wait"):
                batch = next(batches, None)
            self._data_wait += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def add(
        self, step: int, loss_sum: torch.Tensor, weight: float, grad_norm: torch.Tensor | None, own: TaskMetrics
    ) -> None:
        """Take the numbers of the next step, counted from 1, without waiting for the device.

        `loss_sum` is this process's, and `weight` that of the global batch, which divides the sum over all processes.
        `own` is what the task has logged in the step.
        """
        self._losses[step] = loss_sum
        if grad_norm is not None:
            self._norms[step] = grad_norm
        self._weight = weight
        self._own = own
        self._total_weight += weight

    def discard(self, step: int) -> None:
        """Exclude a step that was not taken from the metrics."""
        del self._losses[step]
        self._norms.pop(step, None)

    def log(self, step: int, noise_scale: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The line of metrics.jsonl for `step`, the last one added, over all processes; fails as `check` does.

        Loss and gradient norm are those of this step alone, before its update and before clipping; rates are those
        since the line before. Seconds are those in training since the run's start, with repeated steps counted once.
        The wait for data is per step since the line before, and it and the peak of memory are those of the process
        that has the most. `noise_scale` gives what the line says of it.
        """
        plan = self._plan
        norm = self._norms.get(step)
        losses, num_own, waits, peaks = self._gather()
        loss = math.fsum(losses) / self._weight
        self._data_wait = 0.0
        seconds = self.stopwatch.seconds
        earlier_step, earlier_seconds, earlier_weight = self._logged
        self._logged = (step, seconds, self._total_weight)
        line = {
            **position_fields(plan, step),
            "loss": loss,
            "lr": self.backend.learning_rate,
            "grad_norm": None if norm is None else float(norm),
            "global_batch_size": plan.batch_at(step - 1).size,
            **self._speed(earlier_step, step, self._total_weight - earlier_weight, seconds - earlier_seconds),
            "data_wait_seconds": round(max(waits) / (step - earlier_step), 6),
            "peak_memory_gib": round(max(peaks), 4) or None,
            "seconds": round(self.train_seconds, 3),
            **noise_scale(),
        }
        own = self._own.over_processes(self.backend) if any(num_own) else {}
        if taken := own.keys() & line.keys():
            raise UserError(f"run.log: each line has a {min(taken)!r} already; choose another name", everywhere=True)
        return {name: value for name, value in line.items() if value is not None} | own

    def _speed(self, first_step: int, step: int, weight: float, seconds: float) -> dict[str, float | None]:
        samples = self._plan.batch_at(step).samples_before - self._plan.batch_at(first_step).samples_before
        seconds = max(seconds, 1e-9)
        speed = {"samples_per_second": round(samples / seconds, 3), "mfu": self.utilization.at(samples / seconds)}
        if self._plan.loss_unit == "tokens":
            speed["tokens_per_second"] = round(weight / seconds, 3)
        return speed

    @property
    def train_seconds(self) -> float:
        """Seconds of training since the run's start, with repeated steps counted once."""
        return self.earlier_seconds + self.stopwatch.seconds

    def summary(self, step: int) -> dict[str, Any]:
        """What summary.json says of speed after `step` steps; rates are those of this attempt, after `steps_before`."""
        return {
            "steps": step,
            "steps_before": self.first_step,
            "planned_steps": self._plan.total_steps,
            "samples": self._plan.batch_at(step).samples_before,
            "train_seconds": round(self.train_seconds, 3),
            "world_size": self._plan.world_size,
            **self._speed(self.first_step, step, self._total_weight, self.stopwatch.seconds),
            "mfu_convention": self.utilization.convention,
        }

    def check(self) -> None:
        """Raise TrainingFailed on all processes if a loss or norm since the last logged step is not finite."""
        if self._losses:
            self._gather()

    def _gather(self) -> list[list[float]]:
        """Gather numbers of every process; fails as `check` does.

        Returns four lists, with a number of each process: the sum of losses in the step that was added last, the number
        of the task's own metrics in that step, the seconds of waiting for data since the last line, and the peak of its
        GPU's memory in GiB.
        """
        losses = torch.stack([*self._losses.values()]).tolist()
        norms = torch.stack([*self._norms.values()]).tolist() if self._norms else []
        bad_loss = _first_not_finite(self._losses, losses)
        bad_norm = _first_not_finite(self._norms, norms)
        self._losses.clear()
        self._norms.clear()
        # Zero without a GPU.
        peak = torch.cuda.max_memory_allocated() / GIB
        mine = (losses[-1], len(self._own.values), self._data_wait, peak, *bad_loss)
        gathered = self.backend.all_gather(torch.tensor(mine, dtype=torch.double, device=self.backend.device))
        *numbers, bad_steps, bad_losses = gathered.T.tolist()
        first = min(bad_steps)
        if first < math.inf:
            rank = bad_steps.index(first)
            raise _not_finite(f"the loss is {bad_losses[rank]} at step {first:.0f} on rank {rank}", first)
        step, norm = bad_norm
        if step < math.inf:
            raise _not_finite(f"the gradient's norm is {norm} at step {step}", step)
        return numbers


def _first_not_finite(steps: Iterable[int], numbers: Iterable[float]) -> tuple[float, float]:
    """The first step whose number is not finite, and the number; infinity and zero if there is none."""
    bad = ((step, number) for step, number in zip(steps, numbers, strict=True) if not math.isfinite(number))
    return next(bad, (math.inf, 0.0))


def goodput(history: Sequence[Mapping[str, Any]], step: int, train_seconds: float, now: float) -> float | None:
    """The share of the time since a run's first start that went into steps that were applied and are not repeated.

    It is None if the history has no start, or nothing has been trained.

    Args:
        history: The lines of history.jsonl.
        step: Steps so far.
        train_seconds: Seconds of training in them.
        now: In seconds since 1970, as the times in the history.
    """
    starts = [line["time"] for line in history if line.get("event") == "started"]
    if not starts or not step:
        return None
    lost: set[int] = set()
    for line in history:
        if line.get("event") == "started":
            # Later steps are repeated, perhaps with another outcome.
            lost = {each for each in lost if each <= line["step"]}
        if line.get("event") == "skipped":
            lost.update(range(line["first_skipped_step"], line["step"] + 1))
    share: float = train_seconds * (1 - len(lost) / step) / (now - min(starts))
    return round(share, 4)


def position_fields(plan: RunPlan, step: int) -> dict[str, Any]:
    """How far training is after `step` steps: "step", "samples" trained on and, unless sources are mixed, "epoch"."""
    place: dict[str, Any] = {"step": step, "samples": plan.batch_at(step).samples_before}
    return place if plan.mixture else place | {"epoch": round(float(plan.timeline.progress(step, "epochs")), 6)}


def _not_finite(what: str, step: float) -> TrainingFailed:
    remedy = (
        "Try a longer learning_rate.warmup, a lower learning_rate.base_lr, or optimizer.clip_norm, and look at the "
        "data of that step; faults.on_non_finite can skip such steps"
    )
    if step == 1:
        remedy = "No weights had been trained: look at the initial weights and at the data of that step"
    return TrainingFailed(f"{what}; training stopped and no weights were written. {remedy}", everywhere=True)
