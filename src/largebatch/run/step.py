"""One optimizer step, as the recipe's loop sees it."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from largebatch.backend.base import Backend
from largebatch.data.source import Batch
from largebatch.errors import BackendMismatch, TrainingFailed
from largebatch.run.feed import MicroStep, StepFeed
from largebatch.run.gradcache import FeatureCache
from largebatch.run.record.task_metrics import Logged, TaskMetrics


class Step:
    """One optimizer step: its micro-batches and their gradients; `Run.update` takes it when they are done."""

    def __init__(self, index: int, backend: Backend, feed: StepFeed, heartbeat: Callable[[], None]):
        self.index = index  # the step, counted from 0
        self.batch = feed.batch  # the global batch
        # The weight of the global batch, which divides the loss; known once `micro_batches` has begun.
        self.weight = 0.0
        self.updated = False
        self.own_metrics = TaskMetrics()  # what the recipe has logged
        # If the step measures the gradient noise scale: of each micro-batch of this process, the share in the weight of
        # the global batch, and the squared norm of its part of the gradient.
        self.noise_parts: list[tuple[float, torch.Tensor]] = []
        self._measures_noise = backend.plan.measures_noise_after(index + 1)
        self._backend = backend
        self._feed = feed
        self._micro_steps: Iterable[MicroStep] = feed.micro_steps
        self._heartbeat = heartbeat
        self._micro_steps_done = 0
        self._micro_step: MicroStep | None = None
        self._loss_sum: torch.Tensor | None = None
        self._cache: FeatureCache | None = None

    def micro_batches(self) -> Iterator[Batch]:
        """This process's micro-batches; the loop's body must call `backward` once for each.

        In the ragged batch at the end of an epoch, a process may get another one's sample, because sharded models need
        every process in every pass. It does not count in `backward`, `Run.log` and `metrics`, but would in a sum that
        the recipe makes itself.
        """
        self.weight = self._feed.total_weight()
        if self.weight == 0:
            raise TrainingFailed(
                f"no sample of step {self.index + 1} has a target, so there is nothing to average the loss over; "
                "remove such samples from the data",
                everywhere=True,
            )
        self._backend.untouched.forget()
        for number, micro_step in enumerate(self._micro_steps):
            self._micro_step = micro_step
            self._heartbeat()
            self._backend.seed(micro_step.seed)
            self._backend.begin_micro_step(number, self._feed.num_micro_steps)
            yield micro_step.batch
            if (calls := self._micro_steps_done - number) != 1:
                raise RuntimeError(f"step.backward was called {calls} times for a micro-batch; call it once for each")
        self._micro_step = None

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Add the gradient of one micro-batch.

        Engines average gradients over processes, which makes that of a sum world_size times too small. Multiplied by
        world_size and divided by the global batch's weight, it is that of the mean (Goyal et al. 2017, remark 3).

        Args:
            loss_sum: The *sum* of the losses of the micro-batch's samples (or target tokens), a scalar.
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
        detached = loss_sum.detach() if self._micro_step.contributes else loss_sum.detach() * 0.0
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._add_gradient(self._micro_step, loss_sum)

    def _add_gradient(self, micro_step: MicroStep, loss_sum: torch.Tensor) -> None:
        plan = self._backend.plan
        self._backend.untouched.check()
        factor: float | torch.Tensor = plan.world_size / self.weight if micro_step.contributes else 0.0
        if plan.faults.on_non_finite != "stop":
            # Makes the whole gradient NaN, which every process then sees in the reduced gradient.
            factor = torch.where(torch.isfinite(loss_sum.detach()), factor, torch.nan)
        if self._measures_noise:
            share = micro_step.weight / self.weight if micro_step.contributes else 0.0
            self.noise_parts.append((share, self._backend.measured_backward(loss_sum, factor)))
        else:
            self._backend.backward(loss_sum, factor)
        self._backend.untouched.note()
        self._micro_steps_done += 1

    def log(self, values: Mapping[str, Logged]) -> None:
        """See `Run.log`."""
        if self.updated:
            raise RuntimeError("run.log was called after run.update; call it before, in the step that it is about")
        self.own_metrics.add(values, contributes=self._micro_step is None or self._micro_step.contributes)

    def finish(self) -> torch.Tensor:
        """Check that all micro-batches are done, and return this process's sum of losses; can be called once."""
        if self.updated:
            raise RuntimeError("run.update was called twice for one step; call it once, after step.micro_batches()")
        if self._micro_steps_done != self._feed.num_micro_steps or self._loss_sum is None:
            raise RuntimeError(
                f"run.update was called after {self._micro_steps_done} of {self._feed.num_micro_steps} micro-batches; "
                "go through all of step.micro_batches() first"
            )
        self.updated = True
        return self._loss_sum

    def metrics(self) -> dict[str, float]:
        """The mean loss of the global batch, "loss", and what `Run.log` got in this step; the same on every process.

        To be called by all processes, after the step's `update`. It waits for the device.
        """
        if not self.updated or self._loss_sum is None:
            raise RuntimeError("step.metrics was called before run.update; call it after")
        loss = sum(self._backend.gather_objects(float(self._loss_sum))) / self.weight
        return self.own_metrics.over_processes(self._backend) | {"loss": loss}

    def gather(self, encode: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """Compute the features of the whole global batch, for a coupled loss, without gradients.

        The micro-batches stay on the device for the second pass, by `micro_batches`: images as bytes are small
        compared with what a backward pass keeps.

        Args:
            encode: Maps a micro-batch to features of shape (batch, ...). The recipe calls it again in the second pass,
                where the model draws the same random numbers.

        Returns:
            Shape (samples of the global batch, ...), in the order of samples, the same on every process.
        """
        if self._micro_steps_done or self._cache is not None:
            raise RuntimeError("step.gather was called twice, or after step.backward; call it once, and first")
        if not self._backend.plan.coupled_loss:
            raise RuntimeError(
                "step.gather was called, but the plan says that each sample has its own loss; make "
                "couples_the_batch of Config in config.py return True"
            )
        micro_steps = self._micro_steps = list(self._micro_steps)
        features = []
        with self._backend.forward_only():
            for micro_step in micro_steps:
                self._heartbeat()
                self._backend.seed(micro_step.seed)
                features.append(encode(micro_step.batch))
                num_samples = len(next(iter(micro_step.batch.values())))
                if features[-1].shape[:1] != (num_samples,):
                    raise ValueError(
                        f"step.gather needs features with one row per sample, for {num_samples} samples; given shape "
                        f"{tuple(features[-1].shape)}: put several views of a sample into one row"
                    )
        self._cache = FeatureCache(self._backend, self.batch.size, features)
        return self._cache.gathered

    def couple(self, loss_sum: torch.Tensor) -> None:
        """Set the loss of the whole global batch, for `backward_features`.

        Args:
            loss_sum: The *sum* of the losses of all samples, a scalar, computed from what `gather` returned. It may
                depend on the model's parameters through these features only.
        """
        if self._cache is None:
            raise RuntimeError("step.couple was called without step.gather; compute the loss from gathered features")
        self._loss_sum = self._cache.differentiate(loss_sum)

    def backward_features(self, features: torch.Tensor) -> None:
        """Add the gradient of the coupled loss through one micro-batch's features, which `encode` returned."""
        if self._cache is None or self._micro_step is None:
            raise RuntimeError("step.backward_features was called outside of micro_batches(), or before step.gather")
        self._add_gradient(self._micro_step, self._cache.surrogate(self._micro_steps_done, features))

    def check_passes(self) -> None:
        """Raise BackendMismatch on every process if the two passes of a coupled loss had different features."""
        if self._cache is None:
            return
        with self._backend.raise_on_all_ranks():
            if not self._cache.passes_agree():
                raise BackendMismatch(
                    "a micro-batch has different features in step.micro_batches() than in step.gather, so their "
                    "gradient is not the loss's; compute them with the same function, and no randomness but torch's"
                )


def check_gradients(backend: Backend) -> None:
    """Raise BackendMismatch on all processes if the first step's passes left a trainable parameter without a gradient.

    Strategies differ in what they do with such a parameter: skip it, decay it, or fail.
    """
    with backend.raise_on_all_ranks():
        names = backend.parameters_without_gradient()
        if names:
            raise BackendMismatch(
                f"{len(names)} trainable parameters got no gradient, such as {names[0]}; remove them from the "
                "model, or freeze them (requires_grad = False) before the optimizer is built"
            )
