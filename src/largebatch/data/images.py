"""Labelled images: scikit-learn's digits, or any image data set through `datasets`."""

import io
import math

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from largebatch.config.data import DigitsData, HubImages
from largebatch.config.tasks import ImageClassificationConfig
from largebatch.data.hub import column, open_splits
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError
from largebatch.order import Indices, derive_seed

Pixels = NDArray[np.uint8]

EVALUATION_CROP = 0.875  # the centre crop's side over the shorter side of the image: 224 of 256


def image_sources(config: ImageClassificationConfig) -> tuple[SampleSource, SampleSource]:
    """The training and evaluation images of a recipe.

    Batches are {"pixel_values": uint8 (batch, channels, height, width), "labels": int64 (batch,)}; `normalise` turns
    the pixels into floats on the device.

    Raises:
        DataError: The data cannot be loaded.
    """
    if isinstance(config.data, DigitsData):
        return digits(config.data)
    train, evaluation = open_splits(config.data)
    augment = config.data.train_augmentation == "inception_crop"
    return (
        HubImageSource(train, config.data, augmentation_seed=config.seed if augment else None),
        HubImageSource(evaluation, config.data, augmentation_seed=None),
    )


def normalise(pixels: torch.Tensor, data: DigitsData | HubImages, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 pixels as floats with the data set's mean removed, divided by its standard deviation, colour by colour."""
    mean, std = (data.mean, data.std) if isinstance(data, HubImages) else (DIGITS_MEAN, DIGITS_STD)
    shape = (1, -1, 1, 1)
    mean_255 = torch.tensor(mean, dtype=dtype, device=pixels.device).view(shape) * 255
    std_255 = torch.tensor(std, dtype=dtype, device=pixels.device).view(shape) * 255
    return (pixels.to(dtype) - mean_255) / std_255


# --- digits -------------------------------------------------------------------------------------------------------

# Over all 1,797 images, on a 0 to 1 scale.
DIGITS_MEAN = (0.3053,)
DIGITS_STD = (0.3762,)


class TensorImages:
    """Images that fit in memory.

    Args:
        pixels: uint8, shape (samples, channels, height, width).
        labels: int64, shape (samples,).
    """

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor):
        self.pixels = pixels
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        chosen = torch.from_numpy(indices)
        return {"pixel_values": self.pixels[chosen], "labels": self.labels[chosen]}

    def weight(self, batch: Batch) -> int:
        return len(batch["labels"])


def digits(config: DigitsData) -> tuple[TensorImages, TensorImages]:
    """scikit-learn's handwritten digits, enlarged to `image_size`; every fifth one is for evaluation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    factor = config.image_size // 8
    # Values are 0 to 16.
    small = np.round(data.images * 255 / 16).astype(np.uint8)
    pixels = torch.from_numpy(small.repeat(factor, axis=1).repeat(factor, axis=2)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorImages(pixels[~held_out], labels[~held_out]), TensorImages(pixels[held_out], labels[held_out])


# --- data sets of encoded images ----------------------------------------------------------------------------------


class HubImageSource:
    """Encoded images in a `datasets` data set, decoded, cropped and resized as they are fetched.

    Args:
        dataset: One split, with the columns that the config names.
        config: The recipe's data section.
        augmentation_seed: Seed of the random crops and flips; None is the centre crop.
    """

    def __init__(self, dataset: datasets.Dataset, config: HubImages, augmentation_seed: int | None):
        image_column = column(dataset, config.image_column, "image_column")
        label_column = column(dataset, config.label_column, "label_column")
        dataset = dataset.select_columns([image_column, label_column])
        if not isinstance(dataset.features[image_column], datasets.Image):
            dataset = dataset.cast_column(image_column, datasets.Image())
        self.dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
        self.config = config
        self.augmentation_seed = augmentation_seed

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        rows = self.dataset[indices]
        pixels = [
            self._pixels(encoded, int(index), epoch)
            for encoded, index in zip(rows[self.config.image_column], indices, strict=True)
        ]
        labels = torch.tensor(rows[self.config.label_column], dtype=torch.int64)
        if labels.min() < 0 or labels.max() >= self.config.num_classes:
            bad = int(labels.min() if labels.min() < 0 else labels.max())
            raise DataError(
                f"data.num_classes: {self.config.num_classes}, but the data has the label {bad}; correct it"
            )
        return {"pixel_values": torch.from_numpy(np.stack(pixels)), "labels": labels}

    def weight(self, batch: Batch) -> int:
        return len(batch["labels"])

    def _pixels(self, encoded: dict[str, bytes | str | None], index: int, epoch: int | None) -> Pixels:
        data = encoded["bytes"]
        try:
            image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else str(encoded["path"]))
            if self.augmentation_seed is None or epoch is None:
                return centre_crop(image, self.config.image_size)
            random = np.random.default_rng(derive_seed(self.augmentation_seed, "augmentation", epoch, index))
            return inception_crop(image, self.config.image_size, random)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"the image of sample {index} cannot be decoded: {error}; replace or remove it") from error


def centre_crop(image: Image.Image, size: int) -> Pixels:
    """The square in the middle of an image, `EVALUATION_CROP` of its shorter side, resized to `size` pixels.

    An image whose shorter side is `size` already, such as CIFAR's, is not cut into.

    Returns:
        uint8, shape (3, size, size).
    """
    shorter = min(image.size)
    side = shorter if shorter == size else shorter * EVALUATION_CROP
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return _crop(image, (left, top, left + side, top + side), size)


def inception_crop(image: Image.Image, size: int, random: np.random.Generator) -> Pixels:
    """A random crop of 8 to 100 % of the area with an aspect ratio between 3/4 and 4/3, flipped half of the time.

    Szegedy et al. 2015 (arXiv 1409.4842), section 6, as in Goyal et al. 2017, section 5.1. After ten crops that do not
    fit, the largest centred square.

    Returns:
        uint8, shape (3, size, size).
    """
    box = None
    for _ in range(10):
        area = image.width * image.height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            left = int(random.integers(image.width - width + 1))
            top = int(random.integers(image.height - height + 1))
            box = (left, top, left + width, top + height)
            break
    if box is None:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        box = (left, top, left + side, top + side)
    pixels = _crop(image, box, size)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if random.random() < 0.5 else pixels


def _crop(image: Image.Image, box: tuple[float, float, float, float], size: int) -> Pixels:
    """Decode, crop and resize in one pass; a JPEG is decoded at the smallest scale that still holds the crop."""
    full_width, full_height = image.size
    shorter = min(box[2] - box[0], box[3] - box[1])
    if shorter >= 2 * size:
        image.draft("RGB", (int(full_width * size / shorter), int(full_height * size / shorter)))
    scale_x, scale_y = image.width / full_width, image.height / full_height
    scaled = (box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y)
    resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=scaled)
    return np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)
