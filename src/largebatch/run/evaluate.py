"""Exact evaluation: every sample counted once, on any number of processes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from largebatch.backend.base import Backend
from largebatch.data.loading import Request, load
from largebatch.data.source import Batch, SampleSource

PerSample = Callable[[Batch], dict[str, torch.Tensor]]


def mean_over_samples(
    backend: Backend, source: SampleSource, per_sample: PerSample, batch_size: int, num_workers: int
) -> dict[str, float]:
    """The mean of each value over all samples.

    Every process makes the same number of forward passes, because sharded strategies communicate in each; one that has
    no samples left goes through the first sample again and leaves it out.

    Args:
        backend: The prepared backend.
        source: The evaluation set.
        per_sample: From a batch to values by name, each of shape (batch,).
        batch_size: Samples per forward pass.
        num_workers: Loader processes.
    """
    shares = list(_shares(len(source), batch_size, backend.rank, backend.world_size))
    requests: list[Request] = [(np.arange(start, max(stop, start + 1)), None) for start, stop in shares]
    totals: dict[str, torch.Tensor] = {}
    for (start, stop), batch in zip(shares, load(source, requests, num_workers, backend.device), strict=True):
        for name, values in per_sample(batch).items():
            if values.shape[0] != max(stop - start, 1):
                raise ValueError(
                    f"the evaluation's {name!r} has shape {tuple(values.shape)}; return one value a sample"
                )
            total = values[: stop - start].double().sum()
            totals[name] = totals[name] + total if name in totals else total
    names = sorted(totals)
    sums = backend.all_gather(torch.stack([totals[name] for name in names])).sum(dim=0)
    return {name: value / len(source) for name, value in zip(names, sums.tolist(), strict=True)}


def _shares(num_samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """This process's ranges of samples; an empty one at 0 where others still have some."""
    num_batches = -(-num_samples // batch_size)
    for first in range(0, num_batches, world_size):
        start = (first + rank) * batch_size
        yield (start, min(start + batch_size, num_samples)) if start < num_samples else (0, 0)
