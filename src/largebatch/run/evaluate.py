"""Exact evaluation: every sample counted once, on any number of processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from largebatch.backend.base import Backend
from largebatch.data.loading import Request, load
from largebatch.data.source import Batch, SampleSource

Value = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
PerSample = Callable[[Batch], dict[str, Value]]


def mean_over_samples(
    backend: Backend,
    source: SampleSource,
    num_samples: int,
    per_sample: PerSample,
    batch_size: int,
    num_workers: int,
) -> dict[str, float]:
    """The mean of each value over samples: the sum of what it adds up to over the sum of what it weighs.

    Every process makes the same number of forward passes, because sharded strategies communicate in each; one that has
    no samples left goes through the first sample again and leaves it out.

    Args:
        backend: The prepared backend.
        source: The evaluation set.
        num_samples: How many of it, from the first on.
        per_sample: From a batch to values by name, each of shape (batch,), or a pair of sums and weights of shape
            (batch,) each, such as a sample's losses and its number of target tokens.
        batch_size: Samples per forward pass.
        num_workers: Loader processes.
    """
    totals: dict[str, torch.Tensor] = {}
    for start, stop, batch in _batches(backend, source, num_samples, batch_size, num_workers):
        for name, value in per_sample(batch).items():
            sums, weights = value if isinstance(value, tuple) else (value, torch.ones_like(value))
            for values in (sums, weights):
                if values.shape != (max(stop - start, 1),):
                    raise ValueError(
                        f"the evaluation's {name!r} has shape {tuple(values.shape)}; return one value a sample"
                    )
            total = torch.stack([values[: stop - start].double().sum() for values in (sums, weights)])
            totals[name] = totals[name] + total if name in totals else total
    names = sorted(totals)
    everyones = backend.all_gather(torch.cat([totals[name] for name in names])).sum(dim=0).view(-1, 2).tolist()
    means = (total / weight if weight else math.nan for total, weight in everyones)
    return dict(zip(names, means, strict=True))


def rows_of_samples(
    backend: Backend,
    source: SampleSource,
    num_samples: int,
    per_sample: Callable[[Batch], dict[str, torch.Tensor]],
    batch_size: int,
    num_workers: int,
) -> dict[str, torch.Tensor]:
    """A row for each sample, in their order, the same on every process; computed by all processes together.

    Args:
        backend: The prepared backend.
        source: A data set.
        num_samples: How many of it, from the first on.
        per_sample: From a batch to tensors by name, each of shape (batch, ...).
        batch_size: Samples per forward pass.
        num_workers: Loader processes.
    """
    mine: dict[str, list[torch.Tensor]] = {}
    for start, stop, batch in _batches(backend, source, num_samples, batch_size, num_workers):
        for name, values in per_sample(batch).items():
            if values.shape[:1] != (max(stop - start, 1),):
                raise ValueError(f"{name!r} has shape {tuple(values.shape)}; return one row a sample")
            padded = values.new_zeros(batch_size, *values.shape[1:])
            padded[: stop - start] = values[: stop - start]
            mine.setdefault(name, []).append(padded)
    # Batch n x world_size + r is the n-th of process r; only the last ones are not full.
    return {
        name: backend.all_gather(torch.stack(parts)).transpose(0, 1).flatten(0, 2)[:num_samples]
        for name, parts in mine.items()
    }


def _batches(
    backend: Backend, source: SampleSource, num_samples: int, batch_size: int, num_workers: int
) -> Iterator[tuple[int, int, Batch]]:
    """This process's ranges of samples and their batches; where a range is empty, the batch is the first sample's."""
    shares = list(_shares(num_samples, batch_size, backend.rank, backend.world_size))
    requests: list[Request] = [(np.arange(start, max(stop, start + 1)), None) for start, stop in shares]
    for (start, stop), (batch, _) in zip(shares, load(source, requests, num_workers, backend.device), strict=True):
        yield start, stop, batch


def _shares(num_samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """This process's ranges of samples; an empty one at 0 where others still have some."""
    num_batches = -(-num_samples // batch_size)
    for first in range(0, num_batches, world_size):
        start = (first + rank) * batch_size
        yield (start, min(start + batch_size, num_samples)) if start < num_samples else (0, 0)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each in the mode it was in."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    yield
    for module, mode in training.items():
        module.training = mode
