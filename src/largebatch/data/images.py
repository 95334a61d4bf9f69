"""Labeled images: scikit-learn's digits, or any image data set through `datasets`."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from largebatch.config.data import DigitsData, EncodedImages, HubImages, names_in
from largebatch.config.sections import Evaluation
from largebatch.data.columns import Use
from largebatch.data.crops import EVALUATION_CROP, Crop, center_crop, inception_crop, padded_crop
from largebatch.data.hub import IMAGE_FOLDERS, no_class, open_splits
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch
from largebatch.data.tars import TarRows, open_tars
from largebatch.data.viewer import opaque
from largebatch.errors import DataError, is_transient, reason_of
from largebatch.words import counted, some

if TYPE_CHECKING:
    import datasets
    import pyarrow

Rows: TypeAlias = "datasets.Dataset | TarRows"
"""Rows with encoded images and their labels or texts, by their indices."""
# Pillow would start Ghostscript for an EPS, whatever the file is named.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_CLASSES_SHOWN = 20
MAX_NAME = 80
RANDOM_CROPS = {"inception_crop": inception_crop, "padded_crop": padded_crop}


def normalize_pixels(
    pixels: torch.Tensor, data: DigitsData | EncodedImages, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """uint8 pixels as floats, normalized by the data set's mean and standard deviation of each color."""
    return (pixels.to(dtype) - _of_255(data.mean, dtype, pixels.device)) / _of_255(data.std, dtype, pixels.device)


@cache
def _of_255(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One number per color, times 255; cached, because creating a tensor waits for the device."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1) * 255


# --- digits -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TensorImages:
    """Images in memory."""

    pixels: torch.Tensor  # uint8, of shape (samples, channels, height, width)
    labels: torch.Tensor  # int64, of shape (samples,)

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


class LabeledRows(NamedTuple):
    """Encoded images and their classes."""

    rows: Rows
    labels: NDArray[np.int64]
    class_names: Sequence[str] = ()
    """The names of the classes in the order of their numbers; none if the data has only numbers."""


def open_images(config: HubImages, preparation: Preparation) -> tuple[LabeledRows, LabeledRows]:
    """The images for training and those for evaluation.

    Raises:
        DataError: As `open_splits`; or a column has another type, or a sample lacks its image or its class.
    """
    opened = open_rows(config, preparation, Use("label_column", "any"))
    train, evaluation = map(_labeled, opened, (config, config), (config.train_split, config.eval_split))
    names = train.class_names
    if names and preparation.allowed == "everything":
        shown = some([f"{number} {name}" for number, name in enumerate(names)], MAX_CLASSES_SHOWN)
        print(f"{len(names)} classes of data.num_classes {config.num_classes}: {shown}")
    return train, evaluation


def evaluation_source(
    train: LabeledRows, held_out: LabeledRows, data: HubImages, evaluation: Evaluation
) -> "HubImageSource":
    """The evaluation set, which tells of classes that training, or the part that is evaluated, has no image of."""
    reached = held_out.labels[: evaluation.samples_of(len(held_out.labels))]
    known = np.unique(held_out.labels)
    names = dict(enumerate(train.class_names))
    missing = [str(names.get(label, label)) for label in np.setdiff1d(known, train.labels).tolist()]
    remarks = []
    if missing:
        shown = some(missing, MAX_CLASSES_SHOWN)
        remarks.append(f"evaluation has {counted(len(missing), 'class')} that training has no image of: {shown}")
    if (num_reached := len(np.unique(reached))) < len(known):
        remarks.append(f"evaluation.max_samples reaches {num_reached} of {counted(len(known), 'class')}")
    return HubImageSource(held_out, data, remark="; ".join(remarks) or None)


def open_rows(config: EncodedImages, preparation: Preparation, other: Use) -> Sequence[Rows]:
    """The rows for training and those for evaluation: encoded images, and what the other column that is used has.

    Raises:
        DataError: As `open_splits`; or the images' column has something else.
    """
    import datasets

    if config.path == "webdataset" and config.data_files:
        return open_tars(config, preparation, other.field)
    name = config.image_column
    uses = {name: Use("image_column"), getattr(config, other.field): other}
    rows = []
    for dataset in open_splits(config, preparation, uses):
        kind = dataset.features.arrow_schema.field(name).type
        # Lists of pixels are refused, because nothing says which value is white.
        if str(kind).removeprefix("large_").partition("<")[0] not in ("struct", "binary", "string"):
            raise DataError(
                f"data.image_column: the column {name!r} has {kind}; write the bytes or the paths of image files"
            )
        rows.append(dataset.select_columns([*uses]).cast_column(name, datasets.Image(decode=False)))
    return rows


def _labeled(rows: Rows, config: HubImages, split: str) -> LabeledRows:
    from pyarrow import compute, float64, types

    if isinstance(rows, TarRows):
        return LabeledRows(rows, _classes(rows.labels, config, split, rows.labels.__getitem__))
    images = config.image_column
    column = config.label_column
    table = rows.with_format("arrow")[:]
    given = table[column]
    is_text = rows.builder_name == "text_rows"
    kind = given.type
    if not (is_text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(
            f"data.label_column: the column {column!r} has {kind}; write one class for each image, as a whole "
            f"number from 0 to {config.num_classes - 1}"
        )
    names = getattr(rows.features[column], "names", [])
    is_of_folders = rows.builder_name == "imagefolder" and names
    # As of a folder without others in it.
    if is_of_folders and given.null_count:
        raise no_class(split)
    # Null becomes NaN.
    numbers = (_numbers(given) if is_text else given.cast(float64(), safe=False)).to_numpy()
    of_classes = f" of the classes {some(names, MAX_CLASSES_SHOWN)}" if names else ""
    labels = _classes(numbers, config, split, lambda index: json.dumps(given[index].as_py()) + of_classes)
    # An empty cell of a CSV is a path without a letter.
    paths = compute.fill_null(compute.struct_field(table[images], "path"), "")
    missing = compute.struct_field(table[images], "bytes").is_null().to_numpy() & (paths.to_numpy() == "")
    if missing.any():
        raise DataError(
            f"data.image_column: sample {missing.argmax()} of {split!r} has no image in the column {images!r}; remove "
            "the sample, or write its image's bytes or path"
        )
    if is_of_folders:
        _check_layout(compute.replace_substring_regex(paths, "/[^/]*$", "").unique().to_pylist(), config, split)
    return LabeledRows(rows, labels, names)


def _numbers(texts: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
    """The labels in cells of a CSV, or in values of JSON, as numbers: null for what is not a whole one."""
    from pyarrow import compute, float64

    words = compute.utf8_lower(compute.utf8_trim_whitespace(texts))
    for word, digit in (("true", "1"), ("false", "0")):
        words = compute.replace_substring_regex(words, f"^{word}$", digit)
    is_whole = compute.match_substring_regex(words, r"^\d+(\.0*)?$")
    return compute.if_else(is_whole, words, None).cast(float64())


def _check_layout(folders: Sequence[str], config: HubImages, split: str) -> None:
    """Raise DataError if local folders within those of the classes have been taken for classes."""
    names = names_in(split)
    roots = [config.path] * len(names)
    if config.data_files:
        roots = [pattern for name in names for pattern in config.data_files.by_split[name]]
        # A glob of a certain depth says which folders are classes.
        if not all("**" in pattern or Path(pattern).is_dir() for pattern in roots):
            return
    elif not Path(config.path).expanduser().is_dir():
        return
    if len({folder.rpartition("/")[0] for folder in folders}) > len(roots):
        raise DataError(
            f"data.path: the classes of {split!r} would be the innermost folders, as "
            f"{min(folders)} and {max(folders)}; {IMAGE_FOLDERS}"
        )


def _classes(
    numbers: NDArray[np.int64 | np.float64], config: HubImages, split: str, given: Callable[[int], object]
) -> NDArray[np.int64]:
    """Labels as classes; DataError for the first that is none, as it is `given`."""
    wrong = ~np.isin(numbers, np.arange(config.num_classes))
    if wrong.any():
        index = int(wrong.argmax())
        raise DataError(
            f"data.label_column: sample {index} of {split!r} has the label {given(index)}; write a whole number from 0 "
            f"to {config.num_classes - 1}, or correct data.num_classes {config.num_classes}"
        )
    return numbers.astype(np.int64)


Augmentation = Callable[[Image.Image, int, int], Crop]
"""Takes what training sees of an image, by the epoch and the number of the sample."""


def augmentation_of(config: HubImages, seed: int) -> Augmentation | None:
    """The random crops that the section names, which depend only on the seed, the epoch and the sample."""
    take = RANDOM_CROPS.get(config.train_augmentation)
    if take is None:
        return None

    def augmented(image: Image.Image, epoch: int, index: int) -> Crop:
        random = np.random.default_rng(derive_seed(seed, "augmentation", epoch, index))
        return take(image, config.image_size, random)

    return augmented


@dataclass(eq=False)
class HubImageSource:
    """Encoded images, decoded, cropped and resized when they are fetched."""

    images: LabeledRows
    config: EncodedImages
    augmentation: Augmentation | None = None
    """For training; None, as for evaluation: the center crop."""
    remark: str | None = field(default=None, kw_only=True)
    """What a run should tell about the data."""
    center: float = field(default=EVALUATION_CROP, kw_only=True)
    """The center crop's side over the shorter side of the image."""

    def __post_init__(self) -> None:
        # The first image shows before training whether they can be decoded.
        if len(self):
            self.fetch(np.array([0]), None)

    def __len__(self) -> int:
        return len(self.images.labels)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        rows = self.images.rows[indices]
        crops = [
            decode(encoded, index, partial(self._crop, index=index, epoch=epoch))
            for encoded, index in zip(rows[self.config.image_column], indices.tolist(), strict=True)
        ]
        labels = torch.from_numpy(self.images.labels[indices])
        batch = {"pixel_values": torch.from_numpy(np.stack([crop.pixels for crop in crops])), "labels": labels}
        mirrored = [crop.mirrored for crop in crops]
        if None not in mirrored:
            batch["mirrored"] = torch.tensor(mirrored)
        return batch

    def weight(self, batch: Batch) -> int:
        return len(batch["labels"])

    def _crop(self, image: Image.Image, index: int, epoch: int | None) -> Crop:
        if self.augmentation is None or epoch is None:
            return Crop(center_crop(image, self.config.image_size, self.center))
        return self.augmentation(image, epoch, index)


def decode(
    encoded: dict[str, bytes | str | None],
    index: int,
    take: Callable[[Image.Image], Crop],
    max_pixels: int = sys.maxsize,
) -> Crop:
    """A crop of an image as a viewer shows it.

    Args:
        encoded: The "bytes" of its file, or its "path".
        index: The number of its sample, for errors.
        take: Takes the crop from the image; a JPEG may still be decoded at a smaller scale.
        max_pixels: The most pixels that it may have; a larger one is not decoded.

    Raises:
        DataError: It cannot be decoded.
    """
    data = encoded["bytes"]
    try:
        image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else str(encoded["path"]), formats=FORMATS)
        if image.width * image.height > max_pixels:
            raise ValueError(f"it has {image.width:,} x {image.height:,} pixels, more than {max_pixels:,}")
        return take(opaque(image))
    # Pillow raises SyntaxError for a PNG that is damaged in the middle.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if is_transient(error):
            raise
        file_name = encoded["path"]
        where = f", in {file_name[-MAX_NAME:]}" if isinstance(file_name, str) else ""
        # Pillow names the place of the bytes in memory.
        is_other = isinstance(error, UnidentifiedImageError)
        reason = f"it is not one of {', '.join(FORMATS)}" if is_other else reason_of(error)
        remedy = "replace or remove it"
        if getattr(error, "errno", None):
            remedy += f", or write paths of files, relative to {Path.cwd()}; URLs and base64 are not read"
        raise DataError(f"the image of sample {index} cannot be decoded: {reason}{where}; {remedy}") from error
