"""One optimizer step, as the recipe's loop sees it."""

from collections.abc import Callable, Iterator

import torch

from largebatch.backend.base import Backend
from largebatch.data.source import Batch
from largebatch.plan import RunPlan


class Step:
    """One optimizer step: its micro-batches, their gradients, the update.

    Args:
        index: The step, counted from 0.
        plan: The plan of the run.
        backend: The prepared backend.
        batches: This process's micro-batches of the step, and the seeds of their forward passes, are the next ones of
            this iterator.
        finish: Takes the step's index and this process's sum of losses, and makes the update.
    """

    def __init__(
        self,
        index: int,
        plan: RunPlan,
        backend: Backend,
        batches: Iterator[tuple[int, Batch]],
        finish: Callable[[int, torch.Tensor], None],
    ):
        self.index = index
        self.updated = False
        self._accumulation = plan.gradient_accumulation_steps
        self._backend = backend
        self._batches = batches
        self._finish = finish
        self._micro_steps_done = 0
        self._loss_sum: torch.Tensor | None = None
        # Engines average gradients over the processes: a sum of losses comes out world_size times smaller than in one
        # process. Multiplied back and divided by the whole global batch's weight, it is the mean over the global batch
        # (Goyal et al. 2017, remark 3).
        self._loss_scale = plan.world_size / plan.loss_weight_per_step

    def micro_batches(self) -> Iterator[Batch]:
        """This process's micro-batches; the body must call `backward` once for each."""
        for micro_step in range(self._accumulation):
            seed, batch = next(self._batches)
            torch.manual_seed(seed)
            self._backend.begin_micro_step(micro_step)
            yield batch
            if self._micro_steps_done != micro_step + 1:
                raise RuntimeError(
                    f"step.backward was called {self._micro_steps_done - micro_step} times for a micro-batch; "
                    "call it once for each"
                )

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss_sum: The *sum* of the losses of the micro-batch's samples (or target tokens), a scalar. It is divided
                by the weight of the whole global batch here, the same on every strategy.
        """
        if loss_sum.ndim != 0:
            raise ValueError(
                f"step.backward needs a scalar, the sum of the micro-batch's losses; given shape "
                f'{tuple(loss_sum.shape)}: use reduction="sum"'
            )
        detached = loss_sum.detach()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._backend.backward(loss_sum * self._loss_scale)
        self._micro_steps_done += 1

    def update(self) -> None:
        """Clip, set the learning rate, take the optimizer step and, where it is due, log."""
        if self._micro_steps_done != self._accumulation or self._loss_sum is None:
            raise RuntimeError(
                f"step.update was called after {self._micro_steps_done} of {self._accumulation} micro-batches; "
                "go through all of step.micro_batches() first"
            )
        self.updated = True
        self._finish(self.index, self._loss_sum)
