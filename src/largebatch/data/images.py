"""Labeled images: scikit-learn's digits, or any image data set through `datasets`."""

import io
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from PIL import Image

from largebatch.config.data import DigitsData, HubImages
from largebatch.data.crops import Crop, center_crop, inception_crop, padded_crop
from largebatch.data.hub import column, open_splits
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch
from largebatch.data.tars import TarRows
from largebatch.errors import DataError, is_transient

if TYPE_CHECKING:
    import datasets

Rows: TypeAlias = "datasets.Dataset | TarRows"
"""Rows with encoded images and labels, by their indices."""
# Pillow would start Ghostscript for an EPS, whatever the file is named.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
RANDOM_CROPS = {"inception_crop": inception_crop, "padded_crop": padded_crop}


def normalize_pixels(
    pixels: torch.Tensor, data: DigitsData | HubImages, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """uint8 pixels as floats, normalized by the data set's mean and standard deviation of each color."""
    mean, std = (data.mean, data.std) if isinstance(data, HubImages) else (DIGITS_MEAN, DIGITS_STD)
    return (pixels.to(dtype) - _of_255(mean, dtype, pixels.device)) / _of_255(std, dtype, pixels.device)


@cache
def _of_255(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One number per color, times 255; cached, because creating a tensor waits for the device."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1) * 255


# --- digits -------------------------------------------------------------------------------------------------------

# Over all 1,797 images, on a scale from 0 to 1.
DIGITS_MEAN = (0.3053,)
DIGITS_STD = (0.3762,)


class TensorImages:
    """Images in memory: uint8 pixels of shape (samples, channels, height, width), int64 labels of shape (samples,)."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor):
        self.pixels = pixels
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        chosen = torch.from_numpy(indices)
        return {"pixel_values": self.pixels.index_select(0, chosen), "labels": self.labels.index_select(0, chosen)}

    def weight(self, batch: Batch) -> int:
        return len(batch["labels"])


def digits(config: DigitsData) -> tuple[TensorImages, TensorImages]:
    """scikit-learn's handwritten digits, enlarged to `image_size`; every fifth is for evaluation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    factor = config.image_size // 8
    # Values range from 0 to 16.
    small = np.round(data.images * 255 / 16).astype(np.uint8)
    pixels = torch.from_numpy(small.repeat(factor, axis=1).repeat(factor, axis=2)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorImages(pixels[~held_out], labels[~held_out]), TensorImages(pixels[held_out], labels[held_out])


# --- data sets of encoded images ----------------------------------------------------------------------------------


def open_images(config: HubImages, preparation: Preparation) -> tuple["Rows", "Rows"]:
    """The encoded images for training and for evaluation, with their labels; DataError as `open_splits`."""
    if config.path == "webdataset" and config.data_files:
        if (config.train_split, config.eval_split) != ("train", "validation"):
            raise DataError("data.train_split, data.eval_split: tars have no parts; remove them, and list other tars")
        return TarRows(config, "train", preparation), TarRows(config, "validation", preparation)
    train, evaluation = (_rows_of(split, config) for split in open_splits(config, preparation))
    return train, evaluation


def _rows_of(dataset: "datasets.Dataset", config: HubImages) -> "datasets.Dataset":
    import datasets

    image_column = column(dataset, config.image_column, "image_column")
    label_column = column(dataset, config.label_column, "label_column")
    dataset = dataset.select_columns([image_column, label_column])
    if not isinstance(dataset.features[image_column], datasets.Image):
        dataset = dataset.cast_column(image_column, datasets.Image())
    return dataset.cast_column(image_column, datasets.Image(decode=False))


class HubImageSource:
    """Encoded images, decoded, cropped and resized when they are fetched.

    The crop and mirroring of an image depend only on `augmentation_seed`, the epoch and its index. Without a seed it is
    the center crop.
    """

    def __init__(self, dataset: Rows, config: HubImages, augmentation_seed: int | None):
        self.dataset = dataset
        self.config = config
        self.augmentation_seed = augmentation_seed

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        rows = self.dataset[indices]
        crops = [
            self._crop(encoded, int(index), epoch)
            for encoded, index in zip(rows[self.config.image_column], indices, strict=True)
        ]
        labels = torch.tensor(rows[self.config.label_column], dtype=torch.int64)
        wrong = labels[(labels < 0) | (labels >= self.config.num_classes)]
        if len(wrong):
            given = f"data.num_classes: {self.config.num_classes}"
            raise DataError(f"{given}, but the data has label {wrong[0]}; correct one of them")
        batch = {"pixel_values": torch.from_numpy(np.stack([crop.pixels for crop in crops])), "labels": labels}
        if self.augmentation_seed is not None and epoch is not None:
            batch["mirrored"] = torch.tensor([crop.mirrored for crop in crops])
        return batch

    def weight(self, batch: Batch) -> int:
        return len(batch["labels"])

    def _crop(self, encoded: dict[str, bytes | str | None], index: int, epoch: int | None) -> Crop:
        data = encoded["bytes"]
        try:
            file = io.BytesIO(data) if isinstance(data, bytes) else str(encoded["path"])
            image = Image.open(file, formats=FORMATS)
            return self.crop(image, index, epoch)
        # Pillow raises SyntaxError for a PNG that is damaged in the middle.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            if is_transient(error):
                raise
            raise DataError(f"the image of sample {index} cannot be decoded: {error}; replace or remove it") from error

    def crop(self, image: Image.Image, index: int, epoch: int | None) -> Crop:
        """The model's view of sample `index`; `epoch` is None for evaluation."""
        if self.augmentation_seed is None or epoch is None:
            return Crop(center_crop(image, self.config.image_size))
        random = np.random.default_rng(derive_seed(self.augmentation_seed, "augmentation", epoch, index))
        return RANDOM_CROPS[self.config.train_augmentation](image, self.config.image_size, random)
