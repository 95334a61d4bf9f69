"""What follows a step whose loss or gradient is not finite or spikes: the run fails, skips the step, or rolls back."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from largebatch.backend.base import Backend
from largebatch.errors import TrainingFailed
from largebatch.run.checkpoint.load import load
from largebatch.run.checkpoint.save import CheckpointWriter
from largebatch.run.record.recorder import Recorder
from largebatch.run.resume import Start, checkpoints_of, latest_usable


@dataclass
class BadSteps:
    """Finds steps that must not be applied, and follows the plan's `on_non_finite`.

    Every process has one and makes the same calls: all of them see the same norm of the reduced gradient.
    """

    backend: Backend  # the prepared backend
    start: Start  # where the attempt began
    recorder: Recorder  # gets an event for each skipped step
    writer: CheckpointWriter  # writes the checkpoints to which the run rolls back

    def __post_init__(self) -> None:
        manifest = self.start.manifest
        self._faults = self.backend.plan.faults
        self._spike = self._faults.spike
        self.count = manifest.bad_steps if manifest else 0  # skipped steps of the whole run
        self._remember_norms(manifest.grad_norms if manifest else ())

    def _remember_norms(self, norms: Iterable[float]) -> None:
        self._norms = deque(norms, maxlen=self._spike.window if self._spike else 0)

    def for_manifest(self) -> dict[str, Any]:
        """The fields of a checkpoint's manifest from which a later attempt goes on."""
        return {"bad_steps": self.count, "grad_norms": tuple(self._norms)}

    def max_norm(self) -> float | None:
        """The largest norm of a gradient that is applied; None means any, even one that is not finite."""
        if self._spike is not None and len(self._norms) == self._spike.window:
            mean = fmean(self._norms)
            deviation = math.hypot(*(norm - mean for norm in self._norms)) / math.sqrt(self._spike.window - 1)
            return mean + self._spike.sigmas * deviation
        if self._spike is None and self._faults.on_non_finite == "stop":
            return None
        return math.inf

    def accept(self, grad_norm: torch.Tensor | None) -> None:
        """Remember the norm of an applied step, with which later steps are compared if the recipe looks for spikes."""
        if self._spike is not None and grad_norm is not None:
            self._norms.append(float(grad_norm))

    def handle(self, step: int, loss_sum: float, grad_norm: float) -> None:
        """Continue without the update of `step`, or of all steps since the last checkpoint if the plan says so.

        Every process calls it, because they have all seen the same gradient. `loss_sum` is this process's.

        Raises:
            TrainingFailed: `on_non_finite` is "stop", more steps were bad than `max_bad_steps` allows, or no checkpoint
                can be restored.
        """
        what = f"{self._what(self.backend.gather_objects(loss_sum), grad_norm)} at step {step}"
        if self._faults.on_non_finite == "stop":
            # Raises if something is not finite, and names step and rank.
            self.recorder.metrics.check()
            raise TrainingFailed(
                f"{what}; training stopped before its update. Look at the data of that step, raise "
                'faults.spike.sigmas, or let faults.on_non_finite "skip" such steps',
                everywhere=True,
            )
        self.recorder.metrics.discard(step)
        self.count += 1
        allowed = self._faults.max_bad_steps
        if self.count > allowed:
            raise TrainingFailed(
                f"{what}; {self.count} such steps are more than faults.max_bad_steps {allowed}. "
                "Look at the data of these steps (history.jsonl), or try a longer learning_rate.warmup, a lower "
                "learning_rate.base_lr or, for spikes, a larger faults.spike.sigmas",
                everywhere=True,
            )
        first = step
        if self._faults.on_non_finite == "roll_back":
            first = self._roll_back(what) + 1
        else:
            # As before the forward passes of the step that was not applied.
            self.backend.statistics.restore()
        self.recorder.event("skipped", first_skipped_step=first, bad_steps=self.count, reason=what)
        skipped = f"steps {first} to {step} are" if first < step else "the step is"
        self.recorder.say(f"WARNING: {what}; {skipped} skipped ({self.count} of at most {allowed} such steps)")

    def _what(self, losses: list[float], grad_norm: float) -> str:
        """What is wrong with a step, by the sums of losses of all processes and the norm of the gradient."""
        for rank, loss in enumerate(losses):
            if not math.isfinite(loss):
                return f"the loss is {loss} on rank {rank}"
        if self._spike is None or not math.isfinite(grad_norm):
            return "the gradient is not finite"
        return (
            f"the gradient's norm is {grad_norm:.4g}, above {self.max_norm():.4g}, the mean and "
            f"{self._spike.sigmas:g} standard deviations of the last {self._spike.window} steps,"
        )

    def _roll_back(self, what: str) -> int:
        """Load the latest intact checkpoint and return its step."""
        self.writer.wait()
        candidates = checkpoints_of(self.recorder.folder.checkpoints_dir, self.backend)
        if self.start.checkpoint is not None:
            candidates.append(self.start.checkpoint)
        usable, skipped = latest_usable(candidates, self.backend)
        if usable is None:
            why = f"{skipped[0].path}: {skipped[0].problem}" if skipped else "none has been written yet"
            raise TrainingFailed(
                f"{what}, and no checkpoint can be restored ({why}); try a longer learning_rate.warmup, a lower "
                "learning_rate.base_lr, or a shorter checkpoint.every",
                everywhere=True,
            )
        path, manifest = usable
        with self.backend.raise_on_all_ranks():
            load(self.backend, path, manifest)
        self._remember_norms(manifest.grad_norms)
        return manifest.step
