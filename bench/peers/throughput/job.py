"""What the loops of this folder train: a model, on generated samples in memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Job:
    """A model and its training, as a loop needs it.

    Args:
        model: A model of `transformers`, with its initial weights.
        samples: Mappings of the model's input, "input_ids" or "pixel_values", and "labels".
        micro_batch_size: Samples of a forward pass.
        accumulation: Micro-batches of an optimizer step.
        optimizer: Fused AdamW with these settings, or with "momentum" SGD.
        clip_norm: Or None.
        compile_backend: The backend of `torch.compile`.
        is_image: Whether channels are to be last in memory.
    """

    model: nn.Module
    samples: Dataset
    micro_batch_size: int
    accumulation: int
    optimizer: dict[str, Any]
    clip_norm: float | None
    compile_backend: str
    is_image: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Tokens(Dataset):
    """Blocks of random tokens; the labels are the inputs one token later."""

    def __init__(self, num_samples: int, block_size: int, vocab_size: int):
        self.tokens = torch.randint(vocab_size, (num_samples, block_size + 1), generator=torch.Generator())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class Images(Dataset):
    """Random images as normalised floats, and labels."""

    def __init__(self, num_samples: int, side: int, num_classes: int):
        generator = torch.Generator()
        self.pixels = torch.randn(min(num_samples, 256), 3, side, side, generator=generator)
        self.labels = torch.randint(num_classes, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels[index % len(self.pixels)], "labels": self.labels[index]}


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of a micro-batch."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return cross_entropy(logits.flatten(0, -2).float(), batch["labels"].flatten())


def build_optimizer(model: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Weights of matrices and filters alone decay."""
    settings = dict(settings)
    decay = settings.pop("weight_decay")
    large = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    small = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": large, "weight_decay": decay}, {"params": small, "weight_decay": 0.0}]
    kind = torch.optim.SGD if "momentum" in settings else torch.optim.AdamW
    return kind(groups, lr=1e-4, fused=True, **settings)
