"""What follows a step whose loss or gradient is not finite: the run fails, skips the step, or rolls back."""

import math

from largebatch.backend.base import Backend
from largebatch.errors import TrainingFailed
from largebatch.run.checkpoint.load import load
from largebatch.run.checkpoint.save import CheckpointWriter
from largebatch.run.record.recorder import Recorder
from largebatch.run.resume import Start, checkpoints_of, latest_usable
from largebatch.storage.catalog import entry_at


class NonFiniteSteps:
    """Follows the plan's `on_non_finite`; every process has one and makes the same calls.

    Args:
        backend: The prepared backend.
        start: Where the attempt began.
        recorder: Gets an event for each skipped step.
        writer: Writes the checkpoints to which the run rolls back.
    """

    def __init__(self, backend: Backend, start: Start, recorder: Recorder, writer: CheckpointWriter):
        self._backend = backend
        self._start = start
        self._recorder = recorder
        self._writer = writer
        self._plan = backend.plan
        self.count = start.manifest.bad_steps if start.manifest else 0  # skipped steps of the whole run

    def handle(self, step: int, loss_sum: float) -> None:
        """Continue without the update of `step`, or of all steps since the last checkpoint if the plan says so.

        Every process calls it, because they have all seen the same gradient. `loss_sum` is this process's.

        Raises:
            TrainingFailed: The plan says "stop", there were too many such steps, or there is no checkpoint.
        """
        if self._plan.faults.on_non_finite == "stop":
            # Raises, and names step and rank.
            self._recorder.metrics.check()
        self._recorder.metrics.discard(step)
        losses = self._backend.gather_objects(loss_sum)
        bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        where = (
            f"the loss is {losses[bad_ranks[0]]} on rank {bad_ranks[0]}" if bad_ranks else "the gradient is not finite"
        )
        what = f"{where} at step {step}"
        self.count += 1
        allowed = self._plan.faults.max_bad_steps
        if self.count > allowed:
            raise TrainingFailed(
                f"{what}; {self.count} such steps are more than faults.max_bad_steps {allowed}. "
                "Look at the data of these steps (history.jsonl), or try a longer learning_rate.warmup or a lower "
                "learning_rate.base_lr",
                everywhere=True,
            )
        first = step
        if self._plan.faults.on_non_finite == "roll_back":
            first = self._roll_back(what) + 1
        else:
            # As before the forward passes of the step that was not applied.
            self._backend.statistics.restore()
        self._recorder.event("skipped", first_skipped_step=first, bad_steps=self.count, reason=what)
        skipped = f"steps {first} to {step} are" if first < step else "the step is"
        self._recorder.say(f"WARNING: {what}; {skipped} skipped ({self.count} of at most {allowed} such steps)")

    def _roll_back(self, what: str) -> int:
        """Load the latest intact checkpoint and return its step."""
        self._writer.wait()
        candidates = checkpoints_of(self._recorder.folder.checkpoints_dir, self._backend)
        candidates += [entry_at(self._start.checkpoint)] if self._start.checkpoint is not None else []
        usable, skipped = latest_usable(candidates, self._backend)
        if usable is None:
            why = f"{skipped[0].path}: {skipped[0].problem}" if skipped else "none has been written yet"
            raise TrainingFailed(
                f"{what}, and no checkpoint can be restored ({why}); try a longer learning_rate.warmup, a lower "
                "learning_rate.base_lr, or a shorter checkpoint.every",
                everywhere=True,
            )
        path, manifest = usable
        with self._backend.raise_on_all_ranks():
            load(self._backend, path, manifest)
        return manifest.step
