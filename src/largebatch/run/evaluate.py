"""Exact evaluation: every sample is counted once, on any number of processes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from largebatch.backend.base import Backend
from largebatch.config.optimizers import EMA
from largebatch.data.loading import Request, load
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError, TrainingFailed, UserError
from largebatch.run.record.recorder import Recorder
from largebatch.run.record.task_metrics import TaskMetrics

Value = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
PerSample = Callable[[Batch], dict[str, Value]]
RowsPerSample = Callable[[Batch], dict[str, torch.Tensor]]


MAX_LOSS_FOR_PERPLEXITY = 700.0  # the exponential of a larger one overflows


@dataclass
class Evaluator:
    """Evaluates without gradients, in evaluation mode and with averaged statistics, outside of the time in training."""

    backend: Backend  # the prepared backend
    num_workers: int  # loader processes of this process
    recorder: Recorder  # counts the steps completed, and the time in training
    heartbeat: Callable[[], None]  # called with each batch

    def __post_init__(self) -> None:
        # The set that each name in evaluations.jsonl belongs to; every line begins with the place in the run.
        self._sets: dict[str, str | None] = dict.fromkeys(("step", "samples", "epoch"), "the line itself")

    def means(
        self, eval_set: SampleSource, per_sample: PerSample, name: str | None, before: Callable[[], object]
    ) -> dict[str, float]:
        """Means over a set, as `Run.evaluate` describes them, also with the averaged weights if there are some."""
        plan = self.backend.plan
        num_samples = plan.evaluation_of(name).samples_of(len(eval_set))

        def means_now() -> dict[str, float]:
            """The means with the weights that the model has."""
            before()
            batches = self._batches(eval_set, num_samples)
            means = mean_over_samples(self.backend, batches, per_sample, getattr(eval_set, "parts", {}))
            if plan.loss_unit == "tokens" and means.get("loss", math.inf) < MAX_LOSS_FOR_PERPLEXITY:
                # From the mean over all tokens: a mean of batches' or samples' perplexities would be another number.
                means["perplexity"] = math.exp(means["loss"])
            return means

        with self.evaluating():
            means = means_now()
            if plan.optimizer.ema_half_life is not None:
                with self.backend.averaged_weights():
                    averaged = means_now()
                means |= {f"{EMA}/{value}": mean for value, mean in averaged.items()}
        if name is not None:
            means = {f"{name}/{value}": mean for value, mean in means.items()}
        for value, mean in means.items():
            if self._sets.setdefault(value, name) != name:
                raise UserError(
                    f"run.evaluate: two values are named {value!r}; give this one, or its set, another name",
                    everywhere=True,
                )
            if not math.isfinite(mean):
                raise TrainingFailed(
                    f"the evaluation's {value} is {mean} after step {self.recorder.step}; training stopped and no "
                    "weights were written",
                    everywhere=True,
                )
        return means

    def rows(self, source: SampleSource, num_samples: int, per_sample: RowsPerSample) -> dict[str, torch.Tensor]:
        """Gather what `per_sample` returns for the first samples, as `Run.rows` describes it."""
        mine = []
        with self.evaluating():
            for start, stop, batch in self._batches(source, num_samples):
                rows = per_sample(batch)
                for name, values in rows.items():
                    if values.shape[:1] != (max(stop - start, 1),):
                        raise ValueError(f"{name!r} has shape {tuple(values.shape)}; return one row per sample")
                mine.append({name: values[: stop - start] for name, values in rows.items()})
        self.backend.check_rows(mine, "run.rows")
        return self.backend.gather_rows(mine, num_samples)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In the block, the model is in evaluation mode, without gradients, and the clock of training stands still."""
        with self.recorder.metrics.stopwatch.counting(False):
            self.backend.statistics.average(self.backend.world_size, self.recorder.step)
            # Some parts of a model may be in evaluation mode always.
            training = {module: module.training for module in self.backend.model.modules()}
            self.backend.model.eval()
            try:
                with torch.no_grad():
                    yield
            finally:
                for module, mode in training.items():
                    module.training = mode

    def _batches(self, source: SampleSource, num_samples: int) -> Iterator[tuple[int, int, Batch]]:
        """This process's ranges of the first `num_samples` samples, as (start, stop), and their batches.

        Every process makes the same number of forward passes, because sharded strategies communicate in each; a process
        for which no samples are left gets an empty range and the batch of the first sample.
        """
        backend = self.backend
        size = backend.plan.micro_batch_size
        shares = []
        requests: list[Request] = []
        for first in range(0, num_samples, backend.world_size * size):
            start = first + backend.rank * size
            # A slice of a range ends where the range ends.
            share = range(num_samples)[start : start + size]
            shares.append(share)
            requests.append((np.array(share or [0]), None))
        batches = load(source, requests, self.num_workers, backend.device)
        for share, (batch, _) in zip(shares, batches, strict=True):
            self.heartbeat()
            yield share.start, share.stop, batch


def mean_over_samples(
    backend: Backend,
    batches: Iterable[tuple[int, int, Batch]],
    per_sample: PerSample,
    parts: Mapping[str, range] = {},
) -> dict[str, float]:
    """The mean of each value over the samples of all processes: the sum of the values over the sum of their weights.

    Values that weigh nothing have no mean. Those that only some batches have are means over the samples of these.

    Args:
        backend: The prepared backend.
        batches: This process's ranges of samples, as (start, stop), and their batches.
        per_sample: Maps a batch to values by name, each of shape (batch,), or a pair of sums and weights of shape
            (batch,) each, such as each sample's loss summed over its tokens, and its number of tokens.
        parts: Ranges of samples by name, over each of which there is another mean, named "value/part".
    """
    # All samples, and those of each part.
    subsets = {"": range(2**63 - 1)} | {f"/{name}": part for name, part in parts.items()}
    totals = TaskMetrics()
    for start, stop, batch in batches:
        for name, value in per_sample(batch).items():
            sums, weights = value if isinstance(value, tuple) else (value, torch.ones_like(value))
            for values, which in ((sums, "values"), (weights, "weights")):
                if values.shape != (max(stop - start, 1),):
                    raise ValueError(f"{which} of {name!r} have shape {tuple(values.shape)}; return one per sample")
            for suffix, part in subsets.items():
                inside = slice(max(part.start - start, 0), max(min(part.stop, stop) - start, 0))
                totals.add(
                    {name + suffix: (sums[inside].double().sum(), weights[inside].double().sum())}, contributes=True
                )
    means = totals.over_processes(backend)
    if not means:
        raise DataError("there is nothing to evaluate: the source has no samples, or weights of 0", everywhere=True)
    return dict(sorted(means.items()))
