"""Images with their captions: which of the data can be used, and batches of them.

A pair can be used if it has a caption, without special tokens, and an image that can be decoded and is not too large.
All are tried once, by `largebatch prepare` or by a start with little data, and HF_HOME/largebatch keeps the places of
those that can be used after the numbers of different images and captions.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from datasets.fingerprint import Hasher
from PIL import Image

from largebatch.config.data import HubImages
from largebatch.data.columns import Use
from largebatch.data.crops import Crop, Pixels, center_crop, crop_box, random_box
from largebatch.data.images import HubImageSource, Rows, decode, open_images, open_rows
from largebatch.data.not_text import not_text_in
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import NotPrepared, Preparation, kept
from largebatch.data.source import Batch
from largebatch.errors import DataError
from largebatch.words import counted, printable

from .config import CaptionedImages, Config
from .texts import Texts, number

BYTES_OF_AN_IMAGE = 50_000  # about
MAX_REPLACEMENTS = 10  # that are tried for one pair
MIN_AREA = 0.9
ROWS_AT_ONCE = 100
UNUSABLE = (-(2**63),) * 2  # in place of the numbers of an image and its caption


def open_captioned(
    config: CaptionedImages, preparation: Preparation, texts: Texts, seed: int
) -> list["CaptionedImageSource"]:
    """The pairs for training and those for evaluation.

    Args:
        config: The section, without sources.
        preparation: Who tries which pairs can be used.
        texts: Encodes the captions of a batch.
        seed: The seed of crops and replacements.

    Raises:
        DataError: The data cannot be opened; or a pair that may not be skipped cannot be used, or none can.
        NotPrepared: The pairs have not been tried yet, and may not be here.
    """
    opened = open_rows(config, preparation, Use("caption_column"))
    sources = [CaptionedImageSource(rows, np.arange(len(rows)), config, texts, seed) for rows in opened]
    for source in sources:
        _leave_out(source, preparation)
    return sources


def _leave_out(source: "CaptionedImageSource", preparation: Preparation) -> None:
    """Have the source leave out what cannot be used."""
    config = source.config

    def counts_and_places() -> Indices:
        """How many different images and captions the usable pairs have, and the places of these pairs."""
        preparation.check(config, len(source) * BYTES_OF_AN_IMAGE)
        # Pillow decodes without Python's lock.
        with ThreadPool(preparation.workers_for(config) or 1) as pool:
            parts = [range(len(source))[start : start + ROWS_AT_ONCE] for start in range(0, len(source), ROWS_AT_ONCE)]
            ids = np.concatenate([np.zeros((0, 2), np.int64), *pool.imap(source.ids, parts)])
        usable = np.flatnonzero((ids != UNUSABLE).all(axis=1))
        if len(source) > len(usable) == 0:
            # Tell why.
            source.pair(0, None)
        return np.append([len(np.unique(each)) for each in ids[usable].T], usable)

    key = Hasher.hash([source.rows._fingerprint, config.max_pixels, config.on_invalid, source.texts.fingerprint])
    found = kept(f"ids_{key}", counts_and_places)
    source.places = found[2:]
    parts = []
    if unusable := len(source.rows) - len(source):
        parts.append(f"{unusable:,} of {len(source.rows):,} pairs cannot be used: skipped")
    for count, what in zip(found[:2].tolist(), ("image", "caption"), strict=True):
        if count < len(source):
            parts.append(f"{counted(count, f'different {what}')}: a larger batch repeats them")
    source.remark = "; ".join(parts) or None


class Pair(NamedTuple):
    """A crop of an image, and its caption."""

    pixels: Pixels
    caption: str
    image_id: int
    """The same for images of the same bytes."""


@dataclass
class CaptionedImageSource:
    """Images, decoded, cropped and resized when they are fetched, with their captions.

    A pair that cannot be used any more, but may be skipped, is replaced by one that depends only on the seed and the
    index; warnings count them.
    """

    rows: Rows
    places: Indices
    """The rows that can be used, in their order."""
    config: CaptionedImages
    texts: Texts
    seed: int
    remark: str | None = None
    """How many pairs are left out, and how many images and captions there are, if they are fewer."""
    num_replaced: int = 0

    def __len__(self) -> int:
        return len(self.places)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        """{"pixel_values": uint8 (batch, 3, image_size, image_size)}, and what `Texts` makes of the captions, with the
        images' ids before theirs."""
        pairs = [self._pair_or_another(index, epoch) for index in indices.tolist()]
        batch = self.texts.encode([[each.caption] for each in pairs])
        batch["ids"] = torch.cat([torch.tensor([[each.image_id] for each in pairs]), batch["ids"]], dim=1)
        return {"pixel_values": torch.from_numpy(np.stack([each.pixels for each in pairs])), **batch}

    def weight(self, batch: Batch) -> int:
        return len(batch["pixel_values"])

    def _pair_or_another(self, index: int, epoch: int | None, attempt: int = 0) -> Pair:
        chosen = derive_seed(self.seed, "replacement", index, attempt) % len(self) if attempt else index
        try:
            return self.pair(chosen, epoch)
        except (DataError, FileNotFoundError) as error:
            if self.config.on_invalid == "refuse" or attempt == MAX_REPLACEMENTS:
                raise
            self.num_replaced += 1
            print(printable(f"warning: {error}; replaced, with {self.num_replaced} in all here"), file=sys.stderr)
            return self._pair_or_another(index, epoch, attempt + 1)

    def ids(self, indices: Sequence[int]) -> Indices:
        """The numbers of pairs' images and captions, or `UNUSABLE`; DataError if that may not be skipped."""
        found = []
        for index in indices:
            try:
                pair = self.pair(index, None)
                found.append((pair.image_id, *self.texts.ids([pair.caption])))
            except DataError as error:
                if self.config.on_invalid == "refuse":
                    raise DataError(f'{error}; or leave such pairs out: data.on_invalid "skip"') from error
                found.append(UNUSABLE)
        return np.array(found)

    def pair(self, index: int, epoch: int | None) -> Pair:
        """A crop of an image and its caption; DataError if they cannot be used."""
        row = self.rows[self.places[[index]]]
        (encoded,) = row[self.config.image_column]
        column = self.config.caption_column
        (caption,) = row[column]
        where = encoded["path"] or "the data"
        if not isinstance(caption, str | None):
            kind = type(caption).__name__
            raise DataError(f"sample {index} has a {kind} in {column!r}, in {where}; write one text in each row")
        if not caption or caption.isspace():
            raise DataError(f"sample {index} has no {column!r}, in {where}; write one, or remove it")
        if wrong := not_text_in(caption):
            what = f"{wrong} in {column!r}, which is not text"
            raise DataError(f"sample {index}, in {where}, has {what}; remove it, or write UTF-8")
        if token := self.texts.special_token_in(caption):
            what = f"{token!r} in {column!r}, which the tokenizer reads as a special token"
            raise DataError(f"sample {index}, in {where}, has {what}; write it otherwise, or remove it")
        if not self.texts.knows(caption):
            told = f"the tokenizer does not know most of {column!r}"
            raise DataError(f"sample {index}, in {where}: {told}; write it otherwise, or remove it")
        take = partial(self._crop, index=index, epoch=epoch)
        if not encoded["bytes"]:
            # Once, for the pixels and the number. Of what cannot be read, `decode` tells why.
            with suppress(OSError, TypeError, ValueError):
                encoded = {**encoded, "bytes": Path(encoded["path"]).read_bytes()}
        pixels = decode(encoded, index, take, self.config.max_pixels).pixels
        return Pair(pixels, caption, number(encoded["bytes"] or Path(encoded["path"]).read_bytes()))

    def _crop(self, image: Image.Image, index: int, epoch: int | None) -> Crop:
        size = self.config.image_size
        if epoch is None or self.config.train_augmentation == "none":
            return Crop(center_crop(image, size, part=1))
        random = np.random.default_rng(derive_seed(self.seed, "augmentation", epoch, index))
        return Crop(crop_box(image, random_box(image, MIN_AREA, random), size))


def open_labeled(config: Config, preparation: Preparation) -> Iterator[HubImageSource]:
    """Yield the images of zero-shot evaluation, if there are any.

    Raises:
        DataError: They cannot be opened, or a label has no name.
    """
    if config.zero_shot is None or config.zero_shot.images is None:
        return
    images = config.zero_shot.images
    section = HubImages.model_validate(
        {
            **config.data.model_dump(include={"image_size", "mean", "std", "prepare"}),
            **images.model_dump(exclude={"files"}),
            "source": "datasets",
            "data_files": {"train": images.files, "eval": images.files},
            "num_classes": len(config.zero_shot.class_names),
            "train_augmentation": "none",
            "num_train_samples": 1,
            "num_eval_samples": 1,
        }
    )
    try:
        _, labeled = open_images(section, preparation)
        # Folders are numbered without those that are not there.
        if (num_named := len(labeled.class_names)) not in (0, section.num_classes):
            raise DataError(
                f"they have {counted(num_named, 'class')}, but zero_shot.class_names has {section.num_classes}; write "
                "one name for each, in their order"
            )
        # Cropped as the evaluation images of pairs.
        yield HubImageSource(labeled, section, center=1)
    except NotPrepared:
        raise
    except DataError as error:
        raise DataError(f"zero_shot.images: {error}") from error
