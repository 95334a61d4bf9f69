"""The micro-batches of one process in each optimizer step, and the weight of the whole global batch."""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice, tee
from typing import NamedTuple

from largebatch.backend.base import Backend
from largebatch.batch import GlobalBatch
from largebatch.data.loading import WEIGHT_UNITS, Loaded, load
from largebatch.data.order import MicroBatch, TrainingOrder
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError
from largebatch.plan import RunPlan


class MicroStep(NamedTuple):
    """One forward and backward pass of this process."""

    batch: Batch  # the micro-batch, on the device
    weight: float  # its weight in the loss, such as its number of samples or target tokens
    seed: int  # seed of the randomness inside the model
    contributes: bool  # False for a pass that is made only because the other processes make one; see `order.MicroBatch`


class StepFeed(NamedTuple):
    """The work of one optimizer step: the global batch, and this process's passes, in order."""

    batch: GlobalBatch
    micro_steps: Iterator[MicroStep]
    num_micro_steps: int
    total_weight: Callable[[], float]  # waits for and returns the weight of the global batch


def training_feed(
    backend: Backend,
    train_set: SampleSource,
    num_workers: int,
    first_step: int,
    timed: Callable[[Iterator[Loaded]], Iterator[Loaded]],
) -> Generator[StepFeed, None, None]:
    """The work of this process in each step from `first_step` on; its micro-batches are read through `timed`.

    If samples have unequal weights, a step's micro-batches are loaded, and their weights summed over the processes,
    after the last micro-batch of the step before, so that the sum is usually ready in time. Otherwise nothing is
    communicated. The micro-batches of each step must be used up before the next step.
    """
    plan = backend.plan
    steps = range(first_step, plan.stop_after_steps)
    order = TrainingOrder(plan.timeline, plan.micro_batch_size, plan.world_size, plan.seed, plan.mixture)
    slots = ((step, number) for step in steps for number in range(plan.micro_steps_of(plan.batch_at(step))))
    # Loader processes take requests ahead of the batches.
    micro_batches, ahead = tee(order.micro_batches(slots, backend.rank))
    requests = ((each.indices, each.epoch) for each in ahead)
    batches = timed(load(train_set, requests, num_workers, backend.device))
    # The batch first: making its request belongs to the time that is waited for data.
    passes = (
        _micro_step(plan, micro_batch, loaded) for loaded, micro_batch in zip(batches, micro_batches, strict=True)
    )
    if plan.loss_weight_per_sample is None:
        yield from _weighed(backend, passes, steps)
        return
    for step in steps:
        batch = plan.batch_at(step)
        count = plan.micro_steps_of(batch)
        yield StepFeed(batch, islice(passes, count), count, partial(int, batch.size * plan.loss_weight_per_sample))


def _weighed(backend: Backend, passes: Iterator[MicroStep], steps: range) -> Iterator[StepFeed]:
    """The work of each step, whose weight is summed over the processes."""
    plan = backend.plan
    upcoming: list[StepFeed] = []

    def fetch(step: int) -> None:
        """Load a step's micro-batches, and begin to sum their weights; nothing after the last step."""
        if step in steps:
            batch = plan.batch_at(step)
            own = list(islice(passes, plan.micro_steps_of(batch)))
            weight = sum(micro_step.weight for micro_step in own if micro_step.contributes)
            units = backend.sum_over_processes(round(weight * WEIGHT_UNITS))
            upcoming.append(StepFeed(batch, iter(own), len(own), lambda: units() / WEIGHT_UNITS))

    def before_fetching(micro_steps: Iterator[MicroStep], step: int) -> Iterator[MicroStep]:
        yield from micro_steps
        # The device still computes this step.
        fetch(step)

    for step in steps:
        if not upcoming:
            # The first step; or the recipe has left the loop over micro-batches in the last of them.
            fetch(step)
        work = upcoming.pop()
        yield work._replace(micro_steps=before_fetching(work.micro_steps, step + 1))


def _micro_step(plan: RunPlan, requested: MicroBatch, loaded: Loaded) -> MicroStep:
    count = len(requested.indices)
    each = plan.loss_weight_per_sample
    if each is not None and loaded.weight != count * each:
        raise DataError(
            f"`weight` returned {loaded.weight} for a batch of {count} samples, but the plan says {count * each} "
            f"{plan.loss_unit}, {each} each; correct it, or let loss_weight_per_sample be None in the class of the "
            "config's data section if it differs from sample to sample"
        )
    return MicroStep(loaded.batch, loaded.weight, requested.seed, requested.contributes)
