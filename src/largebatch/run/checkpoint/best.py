"""Which evaluation of a run was the best so far, whose checkpoint is kept."""

from collections.abc import Collection, Mapping

from largebatch.config.sections import KeepBest
from largebatch.storage.layout import BestEvaluation


class Best:
    """The best evaluations, each better than the one before.

    Only the main process's counts, because processes learn at different times that a checkpoint was not written.

    Args:
        keep: What is compared; None means nothing.
        before: The best one that the run's checkpoints have, if they belong to the same run folder.
        sets: The names of further evaluation sets, with which the names of their metrics begin.
    """

    def __init__(self, keep: KeepBest | None, before: BestEvaluation | None, sets: Collection[str] = ()):
        self._keep = keep
        self._sets = sets
        self._other_metrics: set[str] = set()
        self._found = [before] if keep and before and (before.metric, before.mode) == (keep.metric, keep.mode) else []
        self._not_written: set[int] = set()

    @property
    def latest(self) -> BestEvaluation | None:
        """The best evaluation so far, of those whose checkpoints could be written."""
        written = [each for each in self._found if each.step not in self._not_written]
        return written[-1] if written else None

    def is_found(self, step: int, means: Mapping[str, float]) -> bool:
        """Compare an evaluation after `step`, and return whether it is better than all before, and so the latest."""
        keep = self._keep
        if keep is None or keep.metric not in means:
            self._other_metrics.update(means)
            return False
        value = means[keep.metric]
        sign = 1 if keep.mode == "min" else -1
        if self.latest is not None and sign * value >= sign * self.latest.value:
            return False
        self._found.append(BestEvaluation(keep.metric, keep.mode, step, value))
        return True

    def not_found(self) -> str | None:
        """A warning that no evaluation so far had the metric; None if there was none since the last call."""
        names = sorted(self._other_metrics)
        self._other_metrics.clear()
        if self._keep is None or self._found or not names:
            return None
        of_set, _, _ = self._keep.metric.partition("/")
        # It may be evaluated less often.
        if of_set in self._sets and not any(name.startswith(f"{of_set}/") for name in names):
            return None
        return (
            f"checkpoint.keep_best.metric: no evaluation so far had {self._keep.metric!r}, but only {', '.join(names)}"
        )

    def forget(self, step: int) -> None:
        """Return to the best evaluation before `step`, whose checkpoint could not be written."""
        self._not_written.add(step)

    def remember(self, step: int) -> None:
        """Take back `forget`, because the checkpoint is written once more."""
        self._not_written.discard(step)
