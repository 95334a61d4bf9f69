"""One optimizer step, as the recipe's loop sees it."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from largebatch.backend.base import Backend
from largebatch.data.source import Batch
from largebatch.errors import BackendMismatch, TrainingFailed
from largebatch.model.coupled_losses import Encoded
from largebatch.run.coupled import CoupledBatch, CoupledLoss, Encode
from largebatch.run.feed import MicroStep, StepFeed
from largebatch.run.record.task_metrics import Logged, TaskMetrics


class Step:
    """One optimizer step: its micro-batches and their gradients; `Run.update` takes it when they are done."""

    def __init__(self, index: int, is_first: bool, backend: Backend, feed: StepFeed, heartbeat: Callable[[], None]):
        self.index = index  # the step, counted from 0
        self.is_first = is_first  # whether it is the first of this attempt
        self.batch = feed.batch  # the global batch
        # The weight of the global batch, which divides the loss; known once `micro_batches` has begun.
        self.weight = 0.0
        self.updated = False
        self.own_metrics = TaskMetrics()  # what the recipe has logged
        # If the step measures the gradient noise scale: of each micro-batch of this process, the share in the weight of
        # the global batch, and the squared norm of its part of the gradient.
        self.noise_parts: list[tuple[float, torch.Tensor]] = []
        self._backend = backend
        self._feed = feed
        self._micro_steps: Iterable[MicroStep] = feed.micro_steps
        self._heartbeat = heartbeat
        self._micro_steps_done = 0
        self._micro_step: MicroStep | None = None
        self._loss_sum: torch.Tensor | None = None
        self._coupled: CoupledBatch | None = None

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
        detached = loss_sum.detach() if self._micro_step.contributes else loss_sum.detach() * 0.0
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._add_gradient(self._micro_step, loss_sum)

    def _add_gradient(self, micro_step: MicroStep, loss_sum: torch.Tensor) -> None:
        plan = self._backend.plan
        self._backend.untouched.check()
        self._backend.statistics.end_forward(self._micro_steps_done)
        factor: float | torch.Tensor = plan.world_size / self.weight if micro_step.contributes else 0.0
        if plan.faults.on_non_finite != "stop":
            # Makes the whole gradient NaN, which every process then sees in the reduced gradient.
            factor = torch.where(torch.isfinite(loss_sum.detach()), factor, torch.nan)
        if plan.measures_noise_after(self.index + 1):
            share = micro_step.weight / self.weight if micro_step.contributes else 0.0
            self.noise_parts.append((share, self._backend.measured_backward(loss_sum, factor)))
        else:
            self._backend.backward(loss_sum, factor)
        self._backend.untouched.note()
        self._micro_steps_done += 1

    def log(self, values: Mapping[str, Logged]) -> None:
        """Keep the values, as `Run.log` describes them, until the step's line is written."""
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
        if self._coupled is None and self._backend.plan.coupled_features:
            raise RuntimeError(
                "the plan says that the loss compares samples, but step.couple was not called in this step; call it, "
                "or make coupled_features of Config in config.py return 0"
            )
        self._backend.statistics.end_step()
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

    def couple(self, encode: Encode, loss: CoupledLoss) -> None:
        """Add the gradient of a loss that compares each sample with all others; in place of `micro_batches`.

        With one micro-batch per process, each is encoded once. With several, they are encoded twice, and stay on the
        device meanwhile, which is little compared with what a backward pass keeps; `compute.couple` decides otherwise.

        Args:
            encode: Maps a micro-batch to tensors by name, which depend on the model and on the micro-batch alone. Each
                has one row per sample, or is a scalar that is trained, such as a temperature, and the same in all.
            loss: Maps a range of the global batch's samples, as a slice, what these are encoded as, and what all
                samples are, in their order, to the losses of those in the range, shape (samples in the range,). It may
                depend on nothing else that is trained. `largebatch.model.coupled_losses` has some.
        """
        if self._micro_steps_done:
            raise RuntimeError("step.couple was called twice, or after step.backward; call it once, and alone")
        plan = self._backend.plan
        if plan.coupled_features == 0:
            raise RuntimeError(
                "step.couple was called, but the plan says that each sample has its own loss; make coupled_features "
                "of Config in config.py return how many numbers a sample is encoded as"
            )
        size = self.batch.size
        if not plan.encodes_once(self._feed.num_micro_steps):
            self._micro_steps = list(self._micro_steps)
            encoded_first = []
            # BatchNorm's running statistics keep what the second pass makes of them.
            self._backend.statistics.remember()
            with torch.no_grad():
                for micro_step in self._micro_steps:
                    self._heartbeat()
                    self._backend.seed(micro_step.seed)
                    encoded_first.append(_encode(encode, micro_step.batch))
            self._backend.statistics.restore()
            self._coupled = CoupledBatch(self._backend, size, encoded_first, loss, self.is_first)
        for number, batch in enumerate(self.micro_batches()):
            encoded = _encode(encode, batch)
            if self._coupled is None:
                self._coupled = CoupledBatch(self._backend, size, [encoded], loss, self.is_first)
            assert self._micro_step is not None
            self._add_gradient(self._micro_step, self._coupled.surrogate(number, encoded))
        assert self._coupled is not None
        self._loss_sum = self._coupled.loss_sum

    def check_first(self) -> None:
        """Raise BackendMismatch on all processes if the first step's passes left a trainable parameter without a
        gradient, or if the two passes of a coupled loss had different features.

        Strategies differ in what they do with such a parameter: skip it, decay it, or fail.
        """
        with self._backend.raise_on_all_ranks():
            if names := self._backend.gradient_watch.end():
                raise BackendMismatch(
                    f"{len(names)} trainable parameters got no gradient, such as {names[0]}; remove them from the "
                    "model, or freeze them (requires_grad = False) before the optimizer is built"
                )
            if self._coupled is not None and not self._coupled.passes_agree():
                raise BackendMismatch(
                    "step.couple: `encode` returns other features for a micro-batch when it is called again, so their "
                    "gradient is not the loss's; let it depend on no randomness but torch's, and on no earlier call"
                )


def _encode(encode: Encode, batch: Batch) -> Encoded:
    encoded = encode(batch)
    num_samples = len(next(iter(batch.values())))
    for name, values in encoded.items():
        if values.ndim and len(values) != num_samples:
            raise ValueError(
                f"step.couple needs one row per sample, for {num_samples} samples; given {name!r} of shape "
                f"{tuple(values.shape)}: put several vectors of a sample into one row, and return a number as a scalar"
            )
    return encoded
