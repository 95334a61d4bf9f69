"""Mixup (Zhang et al. 2018, arXiv 1710.09412): images and labels mixed in pairs, the same however a batch is divided.

A pair is two consecutive samples of the global batch. Micro-batches are even, so they never split a pair. The epoch's
order decides the pairs, and the mixing weight depends only on the seed, the epoch and the first sample. Each pair is
mixed twice, with the weights exchanged.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from largebatch.data.order import Indices, derive_seed
from largebatch.data.source import Batch, SampleSource


@dataclass(eq=False)
class MixedPairs:
    """Training samples with their mixing weights, drawn from Beta(alpha, alpha)."""

    samples: SampleSource
    alpha: float
    seed: int

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        """The samples and, in training, "own_weight": float32 (batch,), the weight of each sample; its partner has the
        rest."""
        batch = self.samples.fetch(indices, epoch)
        if epoch is None:
            return batch
        weights = np.ones(len(indices), dtype=np.float32)
        # A sample without a partner at the end of an epoch remains unmixed.
        for first in range(0, len(indices) - 1, 2):
            random = np.random.default_rng(derive_seed(self.seed, "mixup", epoch, int(indices[first])))
            weights[first : first + 2] = random.beta(self.alpha, self.alpha)
        batch["own_weight"] = torch.from_numpy(weights)
        return batch

    def weight(self, batch: Batch) -> int | torch.Tensor:
        return self.samples.weight(batch)


def partners(samples: torch.Tensor) -> torch.Tensor:
    """The partner of each sample; shape (batch, …) as `samples`."""
    paired = len(samples) // 2 * 2
    exchanged = samples[:paired].view(-1, 2, *samples.shape[1:]).flip(1).flatten(0, 1)
    return torch.cat([exchanged, samples[paired:]])


def mix(pixels: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Normalized images, mixed with their partners if the batch has weights; (batch, channels, height, width)."""
    if "own_weight" not in batch:
        return pixels
    weight = batch["own_weight"].to(pixels.dtype).view(-1, 1, 1, 1)
    return weight * pixels + (1 - weight) * partners(pixels)


def mixed_cross_entropy(logits: torch.Tensor, batch: Batch, label_smoothing: float) -> torch.Tensor:
    """The loss of each sample by its own label and its partner's, weighted as they are mixed; shape (batch,)."""

    def losses(labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)

    own = losses(batch["labels"])
    if "own_weight" not in batch:
        return own
    weight = batch["own_weight"].to(own.dtype)
    return weight * own + (1 - weight) * losses(partners(batch["labels"]))
