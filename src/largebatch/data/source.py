"""The interface of a data set."""

from typing import Protocol

import torch

from largebatch.data.order import Indices

Batch = dict[str, torch.Tensor]
"""The tensors of a micro-batch by name, each of shape (samples, ...), on the CPU until `data.loading` moves them."""


class SampleSource(Protocol):
    """A data set whose samples are fetched a whole micro-batch at a time, by their indices."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        """The samples at `indices`, in that order, as CPU tensors by name whose first dimension is the batch.

        Args:
            indices: int64, shape (batch,).
            epoch: Counted from 0; with the run's seed and the sample's index it decides the augmentation. None means
                evaluation, without augmentation.
        """

    def weight(self, batch: Batch) -> int | torch.Tensor:
        """The weight of a fetched batch in the mean loss: its number of samples, or of target tokens.

        Or the weights of its samples or targets, in a floating-point tensor of any shape: multiples of 2^-20.
        """


Sources = tuple[SampleSource, ...]
"""The training set, the evaluation set, and any further ones."""
