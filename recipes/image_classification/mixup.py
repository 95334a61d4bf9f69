"""Mixup (Zhang et al. 2018, arXiv 1710.09412): images and labels mixed in pairs, the same however a batch is divided.

A pair is two samples that follow one another in the global batch. Micro-batches are even, so they never part a pair;
which samples meet is up to the epoch's order, and how much of each is a function of the seed, the epoch and the first
sample alone. Both take part twice, with the weights exchanged.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from largebatch.data.order import Indices, derive_seed
from largebatch.data.source import Batch, SampleSource


class MixedPairs:
    """Training samples with what they are mixed by.

    Args:
        samples: Images and labels.
        alpha: Of the distribution Beta(alpha, alpha) that the weight of each pair's first sample is drawn from.
        seed: Of the run.
    """

    def __init__(self, samples: SampleSource, alpha: float, seed: int):
        self.samples = samples
        self.alpha = alpha
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        """The samples, and "own_weight": float32 (batch,), how much of each is left, the rest being its partner's; in
        evaluation, as they are."""
        batch = self.samples.fetch(indices, epoch)
        if epoch is None:
            return batch
        weights = np.ones(len(indices), dtype=np.float32)
        # One that is left over at the end of an epoch stays as it is.
        for first in range(0, len(indices) - 1, 2):
            random = np.random.default_rng(derive_seed(self.seed, "mixup", epoch, int(indices[first])))
            weights[first : first + 2] = random.beta(self.alpha, self.alpha)
        batch["own_weight"] = torch.from_numpy(weights)
        return batch

    def weight(self, batch: Batch) -> int:
        return self.samples.weight(batch)


def partners(samples: torch.Tensor) -> torch.Tensor:
    """Each sample's partner, in its place; shape (batch, …) as `samples`."""
    paired = len(samples) // 2 * 2
    exchanged = samples[:paired].view(-1, 2, *samples.shape[1:]).flip(1).flatten(0, 1)
    return torch.cat([exchanged, samples[paired:]])


def mix(pixels: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Normalized images, mixed with their partners where the batch is to be; (batch, channels, height, width)."""
    if "own_weight" not in batch:
        return pixels
    weight = batch["own_weight"].to(pixels.dtype).view(-1, 1, 1, 1)
    return weight * pixels + (1 - weight) * partners(pixels)


def mixed_cross_entropy(logits: torch.Tensor, batch: Batch, label_smoothing: float) -> torch.Tensor:
    """The loss of each sample, by its own label and its partner's as they are mixed; shape (batch,)."""

    def losses(labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)

    own = losses(batch["labels"])
    if "own_weight" not in batch:
        return own
    weight = batch["own_weight"].to(own.dtype)
    return weight * own + (1 - weight) * losses(partners(batch["labels"]))
