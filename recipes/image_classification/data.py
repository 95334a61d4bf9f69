"""The training and evaluation images of this folder's recipes, and the model's inputs."""

import torch

from largebatch.config.data import DigitsData, HubImages
from largebatch.data.images import (
    HubImageSource,
    augmentation_of,
    digits,
    evaluation_source,
    normalize_pixels,
    open_images,
)
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, SampleSource, Sources

from .config import Config
from .mixup import MixedPairs, mix


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training and evaluation images.

    Batches are {"pixel_values": uint8 (batch, channels, height, width), "labels": int64 (batch,)} and, if training
    images are mirrored at random, "mirrored": bool (batch,). `model_input` does the rest on the device. `MixedPairs`
    adds what mixup needs.

    Raises:
        DataError: The data cannot be loaded.
    """
    train: SampleSource
    evaluation: SampleSource
    if isinstance(config.data, DigitsData):
        train, evaluation = digits(config.data)
    else:
        images, held_out = open_images(config.data, preparation)
        train = HubImageSource(images, config.data, augmentation_of(config.data, config.seed))
        evaluation = evaluation_source(images, held_out, config.data, config.evaluation)
    if config.loss.mixup_alpha is not None:
        train = MixedPairs(train, config.loss.mixup_alpha, config.seed)
    return train, evaluation


def model_input(batch: Batch, data: DigitsData | HubImages, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The model's input: the pixels of a batch, mirrored if they are marked so, normalized, and mixed.

    It is computed on the tensors' device, because loaders copy bytes, a quarter of the size of floats.
    """
    pixels = batch["pixel_values"]
    if "mirrored" in batch:
        pixels = torch.where(batch["mirrored"].view(-1, 1, 1, 1), pixels.flip(-1), pixels)
    return mix(normalize_pixels(pixels, data, dtype), batch)
