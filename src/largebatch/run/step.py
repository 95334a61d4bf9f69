"""One optimizer step, as the recipe's loop sees it."""

from collections.abc import Callable, Iterable, Iterator

import torch

from largebatch.backend.base import Backend
from largebatch.batch import GlobalBatch
from largebatch.data.source import Batch
from largebatch.errors import BackendMismatch, TrainingFailed
from largebatch.plan import RunPlan
from largebatch.run.coupled import FeatureCache
from largebatch.run.feed import MicroStep, StepFeed


class Step:
    """One optimizer step: its micro-batches, their gradients, the update.

    Args:
        index: The step, counted from 0.
        plan: The plan of the run.
        backend: The prepared backend.
        feed: The work of this process in the step.
        finish: Takes the step's index, its global batch, this process's sum of losses and the weight of the global
            batch, and makes the update.
        beat: Called with each micro-batch: there is progress.
    """

    def __init__(
        self,
        index: int,
        plan: RunPlan,
        backend: Backend,
        feed: StepFeed,
        finish: Callable[[int, GlobalBatch, torch.Tensor, int], None],
        beat: Callable[[], None],
    ):
        self.index = index
        self.updated = False
        self._plan = plan
        self._accumulation = feed.num_micro_steps
        self._backend = backend
        self._feed = feed
        self._micro_steps: Iterable[MicroStep] = feed.micro_steps
        self._finish = finish
        self._beat = beat
        self._micro_steps_done = 0
        self._micro_step: MicroStep | None = None
        self._loss_sum: torch.Tensor | None = None
        self._cache: FeatureCache | None = None
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
        for number, micro_step in enumerate(self._micro_steps):
            self._micro_step = micro_step
            self._beat()
            self._backend.seed(micro_step.seed)
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
        if self._cache is not None:
            raise RuntimeError("step.backward was called after step.gather; call step.backward_features instead")
        detached = loss_sum.detach() if self._micro_step.counts else loss_sum.detach() * 0.0
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._add_gradient(loss_sum)

    def _add_gradient(self, loss_sum: torch.Tensor) -> None:
        assert self._micro_step is not None
        factor: float | torch.Tensor = self._plan.world_size / self._weight if self._micro_step.counts else 0.0
        if self._plan.on_non_finite != "stop":
            # Makes the whole gradient infinite or NaN, of which every process learns by its reduction.
            factor = torch.where(torch.isfinite(loss_sum.detach()), factor, torch.nan)
        self._backend.backward(loss_sum, factor)
        self._micro_steps_done += 1

    # --- a loss that couples the whole global batch; see `coupled` ------------------------------------------------

    def gather(self, encode: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """The features of the whole global batch, of all micro-batches and processes, to compute a coupled loss of.

        A first pass over the micro-batches, without gradients. They are kept on the device for the second one, by
        `micro_batches`: images as bytes are small beside what a backward pass keeps.

        Args:
            encode: From a micro-batch to features with a row a sample: shape (batch, ...). The recipe calls it again in
                the second pass; what is random in the model is the same there.

        Returns:
            Shape (samples of the global batch, ...), in the order of samples, the same on every process.
        """
        if self._micro_steps_done or self._cache is not None:
            raise RuntimeError("step.gather was called twice, or after step.backward; call it first, and once")
        micro_steps = self._micro_steps = list(self._micro_steps)
        features = []
        with self._backend.forward_only():
            for micro_step in micro_steps:
                self._beat()
                self._backend.seed(micro_step.seed)
                features.append(encode(micro_step.batch))
                num_samples = len(next(iter(micro_step.batch.values())))
                if features[-1].shape[:1] != (num_samples,):
                    raise ValueError(
                        f"step.gather needs features with a row a sample, of {num_samples} samples; given shape "
                        f"{tuple(features[-1].shape)}: put several views of a sample into one row"
                    )
        self._cache = FeatureCache(self._plan, self._backend, self.index, features)
        return self._cache.everyones

    def couple(self, loss_sum: torch.Tensor) -> None:
        """Give the loss of the whole global batch, for `backward_features` to find its gradient.

        Args:
            loss_sum: The *sum* of the losses of all samples of the global batch, a scalar, computed of what `gather`
                returned. Parameters of the model must act on it by way of the features alone.
        """
        if self._cache is None:
            raise RuntimeError("step.couple was called without step.gather; the loss is one of the gathered features")
        if loss_sum.ndim != 0:
            raise ValueError(
                f"step.couple needs a scalar, the sum of the global batch's losses; given shape {tuple(loss_sum.shape)}"
            )
        self._loss_sum = self._cache.differentiate(loss_sum)

    def backward_features(self, features: torch.Tensor) -> None:
        """Add the gradient of the coupled loss by way of one micro-batch's features.

        Args:
            features: What `encode` gives for the micro-batch, now with gradients.
        """
        if self._cache is None or self._micro_step is None:
            raise RuntimeError(
                "step.backward_features was called outside of step.micro_batches(), or before step.gather"
            )
        self._add_gradient(self._cache.surrogate(self._micro_steps_done, features))

    def check_passes(self) -> None:
        """Raise on every process if the passes of a coupled loss had other features; the gradient is wrong then.

        Raises:
            BackendMismatch: They had, on some process.
        """
        if self._cache is None:
            return
        with self._backend.agreement():
            if not self._cache.passes_agree():
                raise BackendMismatch(
                    "a micro-batch has other features in step.micro_batches() than in step.gather, so their gradient "
                    "is not the loss's; compute them by the same function, with no randomness but torch's"
                )

    def update(self) -> None:
        """Clip, set the learning rate, take the optimizer step and, where it is due, log."""
        if self._micro_steps_done != self._accumulation or self._loss_sum is None:
            raise RuntimeError(
                f"step.update was called after {self._micro_steps_done} of {self._accumulation} micro-batches; "
                "go through all of step.micro_batches() first"
            )
        self.updated = True
        self._finish(self.index, self._feed.batch, self._loss_sum, self._weight)
