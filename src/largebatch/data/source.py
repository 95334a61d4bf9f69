"""What the library asks of a data set."""

from typing import Protocol

import torch

from largebatch.data.order import Indices

Batch = dict[str, torch.Tensor]


class SampleSource(Protocol):
    """A data set whose samples are fetched a whole micro-batch at a time, by their indices."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        """The samples at `indices`, in that order.

        Args:
            indices: int64, shape (batch,).
            epoch: Epoch, counted from 0, which with the run's seed and the sample's index decides the augmentation;
                None is evaluation, without augmentation.

        Returns:
            CPU tensors by name, each with the batch as its first dimension.
        """
        ...

    def weight(self, batch: Batch) -> int:
        """What a fetched batch counts in the mean that is the loss: its samples, or its target tokens."""
        ...
