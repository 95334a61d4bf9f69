"""Several sources as one training set, whose shares `largebatch.batch.mixture` decides, and one evaluation set.

A training index stands for a number of draws and a source: index = draw x number of sources + source. The draws of a
source go through its own shuffled epochs. An evaluation index counts through the sources, one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from largebatch.config.data import Data
from largebatch.data.loading import check_sizes
from largebatch.data.order import Indices, derive_seed, epoch_order
from largebatch.data.source import Batch, SampleSource, Sources
from largebatch.data.text import IGNORE_INDEX
from largebatch.errors import DataError, StorageError, UserError


def open_mixed(data: Data, seed: int, open_one: Callable[[Any, int], Sources]) -> Sources:
    """The training and evaluation samples of a section that may be a mixture.

    Args:
        data: The section.
        seed: The run's seed.
        open_one: Opens a section without sources, of any kind that the task has, with a seed that is its own.

    Raises:
        DataError: A source cannot be opened, or does not have the size that its section says.
        StorageError: Its prepared data cannot be written, for a reason that may pass.
    """
    sections = data.sections()
    if not sections:
        return open_one(data, seed)
    opened: list[Sources] = []
    for name, section in sections.items():
        try:
            opened.append(open_one(section, derive_seed(seed, "source", name)))
            check_sizes(opened[-1], section)
        except UserError as error:
            kind = StorageError if isinstance(error, StorageError) else DataError
            raise kind(f'source "{name}": {error}') from error
    return tuple(MixedSamples([*sections], sources, seed) for sources in zip(*opened, strict=True))


class MixedSamples:
    """The samples of several sources.

    Args:
        names: Names of the sources.
        sources: The sources, whose batches have tensors of the same names.
        seed: The run's seed.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[SampleSource], seed: int):
        self.sources = sources
        self.seeds = [derive_seed(seed, "source", name) for name in names]
        self.ends = np.cumsum([len(source) for source in sources])
        self.parts = {
            name: range(int(end) - len(source), int(end))
            for name, source, end in zip(names, sources, self.ends, strict=True)
        }
        """The evaluation indices of each source, by its name."""
        self.num_available = sum(getattr(source, "num_available", len(source)) for source in sources)
        remarks = {name: getattr(source, "remark", None) for name, source in zip(names, sources, strict=True)}
        self.remark = "; ".join(f"{name}: {remark}" for name, remark in remarks.items() if remark) or None

    def __len__(self) -> int:
        return int(self.ends[-1])

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        if epoch is None:
            which = np.searchsorted(self.ends, indices, side="right")
            epochs = np.zeros_like(indices)
            places = indices - np.array([0, *self.ends])[which]
        else:
            draws, which = np.divmod(indices, len(self.sources))
            epochs, places = np.divmod(draws, np.diff(self.ends, prepend=0)[which])
        parts = []
        rows = []
        for number, of_epoch in sorted(set(zip(which.tolist(), epochs.tolist(), strict=True))):
            rows.append(np.flatnonzero((which == number) & (epochs == of_epoch)))
            chosen = places[rows[-1]]
            if epoch is not None:
                chosen = epoch_order(len(self.sources[number]), self.seeds[number], of_epoch)(chosen)
            parts.append(self.sources[number].fetch(chosen, None if epoch is None else of_epoch))
        order = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return {name: _joined(name, [part[name] for part in parts])[order] for name in parts[0]}

    def weight(self, batch: Batch) -> int | torch.Tensor:
        return self.sources[0].weight(batch)


def _joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several batches, with the shorter ones padded as their sources pad."""
    if parts[0].ndim < 2:
        return torch.cat(list(parts))
    longest = max(part.shape[1] for part in parts)
    value = IGNORE_INDEX if name == "labels" else 0
    return torch.cat([pad(part, (0, longest - part.shape[1]), value=value) for part in parts])
