"""One optimizer step, as the recipe's loop sees it."""

from collections.abc import Callable, Iterator

import torch

from largebatch.backend.base import Backend
from largebatch.data.source import Batch
from largebatch.errors import TrainingFailed
from largebatch.plan import RunPlan
from largebatch.run.feed import MicroStep, StepFeed


class Step:
    """One optimizer step: its micro-batches, their gradients, the update.

    Args:
        index: The step, counted from 0.
        plan: The plan of the run.
        backend: The prepared backend.
        feed: The work of this process in the step.
        finish: Takes the step's index, this process's sum of losses and the weight of the global batch, and makes the
            update.
        beat: Called with each micro-batch: there is progress.
    """

    def __init__(
        self,
        index: int,
        plan: RunPlan,
        backend: Backend,
        feed: StepFeed,
        finish: Callable[[int, torch.Tensor, int], None],
        beat: Callable[[], None],
    ):
        self.index = index
        self.updated = False
        self._plan = plan
        self._accumulation = plan.micro_steps_at(index)
        self._backend = backend
        self._feed = feed
        self._finish = finish
        self._beat = beat
        self._micro_steps_done = 0
        self._micro_step: MicroStep | None = None
        self._loss_sum: torch.Tensor | None = None
        self._weight = 0

    def micro_batches(self) -> Iterator[Batch]:
        """This process's micro-batches; the body must call `backward` once for each.

        In the ragged batch at the end of an epoch, a process may get a sample of another one, whose loss and gradient
        do not count: sharded models need every process in every pass.
        """
        self._weight = self._feed.total_weight()
        if self._weight == 0:
            error = TrainingFailed(
                f"no sample of step {self.index + 1} has a target, so there is nothing to take the mean over; remove "
                "such samples from the data"
            )
            error.everywhere = True
            raise error
        for number, micro_step in enumerate(self._feed.micro_steps):
            self._micro_step = micro_step
            self._beat()
            torch.manual_seed(micro_step.seed)
            self._backend.begin_micro_step(number, self._accumulation)
            yield micro_step.batch
            if self._micro_steps_done != number + 1:
                raise RuntimeError(
                    f"step.backward was called {self._micro_steps_done - number} times for a micro-batch; "
                    "call it once for each"
                )

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Add the gradient of one micro-batch.

        Engines average gradients over the processes: a sum of losses comes out world_size times smaller than in one
        process. Multiplied back and divided by the whole global batch's weight, it is the mean over the global batch
        (Goyal et al. 2017, remark 3).

        Args:
            loss_sum: The *sum* of the losses of the micro-batch's samples (or target tokens), a scalar. It is divided
                by the weight of the whole global batch here, the same on every strategy.
        """
        if loss_sum.ndim != 0:
            raise ValueError(
                f"step.backward needs a scalar, the sum of the micro-batch's losses; given shape "
                f'{tuple(loss_sum.shape)}: use reduction="sum"'
            )
        if self._micro_step is None:
            raise RuntimeError("step.backward was called outside of step.micro_batches()")
        if not self._micro_step.counts:
            loss_sum = loss_sum * 0.0
        detached = loss_sum.detach()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        scaled = loss_sum * (self._plan.world_size / self._weight)
        if self._plan.on_non_finite != "stop":
            # Makes the whole gradient infinite or NaN, of which every process learns by its reduction.
            scaled = scaled * torch.where(torch.isfinite(detached), 1.0, torch.nan)
        self._backend.backward(scaled)
        self._micro_steps_done += 1

    def update(self) -> None:
        """Clip, set the learning rate, take the optimizer step and, where it is due, log."""
        if self._micro_steps_done != self._accumulation or self._loss_sum is None:
            raise RuntimeError(
                f"step.update was called after {self._micro_steps_done} of {self._accumulation} micro-batches; "
                "go through all of step.micro_batches() first"
            )
        self.updated = True
        self._finish(self.index, self._loss_sum, self._weight)
