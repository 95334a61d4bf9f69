"""A step of the longest samples, without an update: whether its memory suffices shows before training, not in it."""

import math
from collections.abc import Callable

import numpy as np
import torch

from largebatch.backend.base import Backend
from largebatch.data.loading import load
from largebatch.data.order import derive_seed
from largebatch.data.source import SampleSource
from largebatch.run.feed import MicroStep, StepFeed
from largebatch.run.step import Step


class RehearsedStep(Step):
    """A step that no update follows: its gradients are NaN, with which no engine takes a step."""

    is_rehearsal = True

    def _add_gradient(self, micro_step: MicroStep, loss_sum: torch.Tensor) -> None:  # noqa: ARG002 - all are alike
        self._backend.backward(loss_sum, math.nan)
        self._micro_steps_done += 1


def rehearsed_step(
    index: int,
    backend: Backend,
    train_set: SampleSource,
    heartbeat: Callable[[], None],
    say: Callable[[str], None],
) -> Step:
    """Passes over a micro-batch of the longest samples; every process must call this.

    There are as many as in a step, but at most two unless the loss couples samples and needs the features of all: the
    last one reduces the gradients that the others accumulate.
    """
    plan = backend.plan
    with backend.raise_on_all_ranks():
        count = min(plan.micro_batch_size, len(train_set))
        longest = getattr(train_set, "longest", None)
        chosen = (longest(count), None) if longest else (np.arange(count), 0)
        (loaded,) = load(train_set, [chosen], 0, backend.device)
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in loaded.batch.items())
    say(
        "rehearsing a step without an update, to test whether its memory suffices, with the "
        f"{'longest' if longest else 'first'} {count} samples: {shapes}"
    )
    passes = plan.max_gradient_accumulation_steps
    if not plan.coupled_loss:
        passes = min(2, passes)
    micro_step = MicroStep(loaded.batch, loaded.weight, derive_seed(plan.seed, "rehearsal"), contributes=True)
    feed = StepFeed(plan.batch_at(index), iter([micro_step] * passes), passes, lambda: max(1, loaded.weight))
    return RehearsedStep(index, backend, feed, heartbeat)
