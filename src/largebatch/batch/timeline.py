"""Which samples each optimizer step consumes, with a constant or growing batch size: a pure function of the step.

Within a *phase* the batch size is constant, so any step is found in constant time. A batch never crosses the end of an
epoch: the samples left there, too few for a global batch, are dropped, or kept as a smaller, *ragged* batch.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

Unit = Literal["steps", "samples", "tokens", "epochs"]

NO_EPOCHS = 2**62  # samples of a training set without epochs, such as a mixture

# Bounds for a timeline that is read from a file: with other numbers, a search for a step might never end.
AtLeastOne = Annotated[int, Field(ge=1, lt=2**63)]
AtLeastZero = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Length:
    """An amount of training in one unit."""

    unit: Unit
    amount: int | float

    @cached_property
    def exact(self) -> Fraction:
        """The amount as the fraction that was meant: 0.1 epochs is 1/10 and 0.3333333 epochs is 1/3."""
        return Fraction(self.amount).limit_denominator(10**9)

    def __str__(self) -> str:
        amount = f"{self.amount:,g}" if isinstance(self.amount, float) else f"{self.amount:,}"
        return f"{amount} {self.unit[:-1] if amount == '1' else self.unit}"


class GlobalBatch(NamedTuple):
    """The samples of one optimizer step: positions `start` to `start + size` of the order of `epoch`."""

    epoch: int
    start: int
    size: int  # samples of this step; fewer than `global_batch_size` in a ragged batch
    global_batch_size: int  # the current batch size, which the learning rate follows
    samples_before: int  # samples that all earlier steps trained on


@dataclass(frozen=True)
class Phase:
    """Steps with one batch size, from `first_step` to the next phase."""

    first_step: AtLeastZero
    global_batch_size: AtLeastOne
    epoch: AtLeastZero  # epoch of the first step
    start: AtLeastZero  # position of the first step in its epoch
    samples_before: AtLeastZero  # samples trained on before the phase


@dataclass(frozen=True)
class Timeline:
    """The global batches of a run."""

    num_train_samples: AtLeastOne  # samples of the training set
    keep_last: bool  # whether the ragged batch at the end of each epoch is trained on, or dropped
    tokens_per_sample: AtLeastOne | None  # target tokens of each sample; None if samples have none or different numbers
    phases: tuple[Phase, ...]  # the batch sizes; see `build`

    @classmethod
    def build(
        cls,
        num_train_samples: int,
        batch_sizes: Iterable[tuple[Length, int]],
        keep_last: bool = False,
        tokens_per_sample: int | None = None,
    ) -> "Timeline":
        """A timeline from batch sizes and the moments from which they are used, the first of which is 0.

        Raises:
            ValueError: A moment is in a unit that the data does not have, or is not after the previous one.
        """
        timeline = cls(num_train_samples, keep_last, tokens_per_sample, ())
        for moment, size in batch_sizes:
            phase = Phase(0, size, 0, 0, 0)
            if timeline.phases:
                step = timeline.steps_in(moment)
                previous = timeline.phases[-1].first_step
                if step <= previous:
                    raise ValueError(
                        f"size {size} starts at {moment}, which is step {step}, not after step {previous}, where the "
                        "previous size starts; write a later start, or a larger increment for a ramp"
                    )
                batch = timeline.at(step)
                phase = Phase(step, size, batch.epoch, batch.start, batch.samples_before)
            timeline = replace(timeline, phases=(*timeline.phases, phase))
        return timeline

    def at(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step `step`, counted from 0."""
        phase = self.phases[-1]
        if step < phase.first_step:
            phase = self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1]
        size = phase.global_batch_size
        steps_before = step - phase.first_step
        steps_to_epoch_end, samples_to_epoch_end = self._left_in_epoch(phase.start, size)
        if steps_before < steps_to_epoch_end:
            epoch = phase.epoch
            start = phase.start + steps_before * size
            samples_before = phase.samples_before + steps_before * size
        else:
            steps_per_epoch, samples_per_epoch = self._left_in_epoch(0, size)
            whole_epochs, step_in_epoch = divmod(steps_before - steps_to_epoch_end, steps_per_epoch)
            epoch = phase.epoch + 1 + whole_epochs
            start = step_in_epoch * size
            samples_before = phase.samples_before + samples_to_epoch_end + whole_epochs * samples_per_epoch + start
        return GlobalBatch(epoch, start, min(size, self.num_train_samples - start), size, samples_before)

    def _left_in_epoch(self, start: int, size: int) -> tuple[int, int]:
        """Steps and their samples from position `start` to the end of the epoch."""
        left = self.num_train_samples - start
        return (-(-left // size), left) if self.keep_last else (left // size, left // size * size)

    # --- amounts of training --------------------------------------------------------------------------------------

    def progress(self, step: int, unit: Unit) -> Fraction:
        """The exact amount of training in the first `step` steps. An epoch is over when its last batch is.

        Raises:
            ValueError: Samples have no tokens, or not all the same number; or there are no epochs.
        """
        return Fraction(*self._progress(step, unit))

    def _progress(self, step: int, unit: Unit) -> tuple[int, int]:
        """`progress` as numerator and denominator: every step needs it, and Python's fractions are slow."""
        if unit == "steps":
            return step, 1
        batch = self.at(step)
        if unit == "samples":
            return batch.samples_before, 1
        if unit == "tokens":
            if self.tokens_per_sample is None:
                raise ValueError(
                    "is given in tokens, but the samples of this data have no fixed number of tokens; use epochs, "
                    "steps or samples"
                )
            return batch.samples_before * self.tokens_per_sample, 1
        if self.num_train_samples == NO_EPOCHS:
            raise ValueError(
                "is given in epochs, but a mixture has none, because its sources end at different times; use steps, "
                'samples or tokens, or data.weights "by_size"'
            )
        _, left = self._left_in_epoch(batch.start, batch.global_batch_size)
        whole = batch.start + left
        return batch.epoch * whole + batch.start, whole

    def steps_in(self, length: Length) -> int:
        """The smallest number of steps from the start of training that are at least `length`; raises as `progress`."""
        return _first(lambda step: self.progress(step, length.unit) >= length.exact)

    def steps_before(self, step: int, length: Length) -> int | None:
        """The last step that is at least `length` before step `step`; None if it would be before the start of training.
        Raises as `progress`."""
        left = self.progress(step, length.unit) - length.exact
        if left < 0:
            return None
        return _first(lambda earlier: self.progress(earlier, length.unit) > left) - 1

    def crosses_multiple(self, step: int, every: Length) -> bool:
        """Whether training passes a multiple of `every` with the last of the first `step` steps."""

        def multiples(step: int) -> int:
            numerator, denominator = self._progress(step, every.unit)
            return numerator * every.exact.denominator // (denominator * every.exact.numerator)

        return multiples(step) > multiples(step - 1)


def _first(reached: Callable[[int], bool]) -> int:
    """The first step, from 0 on, at which a condition holds that remains true from then on."""
    bound = 1
    while not reached(bound):
        bound *= 2
    # By hand, because `bisect` does not take numbers from 2^63 on.
    low = 0
    high = bound
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return low
