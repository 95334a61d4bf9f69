"""Steps whose update is left out, because their loss or gradient was not finite."""

import math

from largebatch.backend.base import Backend
from largebatch.checkpoint.load import load
from largebatch.checkpoint.save import CheckpointWriter
from largebatch.errors import TrainingFailed, ordinal
from largebatch.run.record import Record
from largebatch.run.resume import Start, checkpoints_of, newest_usable
from largebatch.storage.catalog import entry_at
from largebatch.storage.layout import read_manifest


class SkippedSteps:
    """Leaves steps out, and counts them. Every process makes the same calls: they have all seen the same gradient."""

    def __init__(self, backend: Backend, record: Record, writer: CheckpointWriter, start: Start):
        self._backend, self._record, self._writer, self._start = backend, record, writer, start
        self._most = backend.plan.max_bad_steps
        self.count = start.manifest.bad_steps if start.manifest else 0
        """Steps of the whole run that were not finite."""

    def leave_out(self, step: int, loss_sum: float) -> str:
        """Continue without the update of step `step`, or of all steps since the last checkpoint if the plan says so.

        Args:
            step: The step, counted from 1, whose update was not made.
            loss_sum: This process's sum of losses.

        Returns:
            What was done, for a person; TrainingFailed if nothing can be.
        """
        losses = self._backend.gather_objects(loss_sum)
        bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        what = (
            f"the loss is {losses[bad_ranks[0]]} on rank {bad_ranks[0]}" if bad_ranks else "the gradient is not finite"
        )
        what += f" at step {step}"
        self.count += 1
        if self.count > self._most:
            raise TrainingFailed(
                f"{what}, and it is the {ordinal(self.count)} such step, more than faults.max_bad_steps {self._most}. "
                "Look at the data of these steps (history.jsonl), or try a longer learning_rate.warmup or a lower "
                "learning_rate.base_lr",
                everywhere=True,
            )
        first = step
        if self._backend.plan.on_non_finite == "roll_back":
            first = self._roll_back(what) + 1
        else:
            self._backend.forget_step()
        self._record.event("skipped", step, first_skipped_step=first, bad_steps=self.count, reason=what)
        left_out = f"steps {first} to {step} are" if first < step else "the step is"
        return f"WARNING: {what}; {left_out} left out ({self.count} of at most {self._most} such steps)"

    def _roll_back(self, what: str) -> int:
        """Load the newest intact checkpoint and return its step."""
        self._writer.wait()
        usable, skipped = newest_usable(checkpoints_of(self._writer.folder, self._backend), self._backend)
        if usable is None and self._start.checkpoint is not None:
            usable, more = newest_usable([entry_at(self._start.checkpoint)], self._backend)
            skipped += more
        if usable is None:
            raise TrainingFailed(
                f"{what}, and there is no checkpoint to roll back to {f'({skipped[0]})' if skipped else 'yet'}; try a "
                "longer learning_rate.warmup, a lower learning_rate.base_lr, or a shorter checkpoint.every",
                everywhere=True,
            )
        with self._backend.raise_on_all_ranks():
            manifest = read_manifest(usable.path)
            load(self._backend, usable.path, manifest)
        return manifest.step
