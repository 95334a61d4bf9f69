"""Pairs: an image and its text, or a query, its passage and hard negatives.

Batches are {"input_ids": int64 (batch, texts, max_tokens), "mask": bool of that shape, "ids": int64 (batch, vectors)},
and for images {"pixel_values": uint8 (batch, channels, height, width), "labels": int64 (batch,)}. What has the same id
is the same.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from largebatch.data.hub import Use, open_splits
from largebatch.data.images import TensorImages, digits
from largebatch.data.mixture import open_mixed
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, SampleSource
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer
from largebatch.errors import DataError

from .config import DIGIT_NAMES, CaptionedImages, Config, Headings, ImageText, NamedDigits, TextPairs, ZeroShot
from .images import open_captioned, text_id

TEMPLATES = ("{}", "the digit {}", "a photo of the number {}", "a handwritten {}")
UNDERLINE = re.compile(r"([*=\-~^])\1{2,}")
SHORTEST = 80  # characters of a paragraph that a heading is to be found by


def sources(config: Config, preparation: Preparation) -> tuple[SampleSource, SampleSource]:
    """The training and evaluation pairs.

    Raises:
        DataError: The data or the tokenizer cannot be loaded or used.
    """
    texts = Texts(config)
    data = config.data
    if isinstance(data, NamedDigits):
        train, held_out = digits(data)
        return DigitPairs(train, texts, config.seed), DigitPairs(held_out, texts, None)
    if isinstance(data, Headings):
        return _headings(data, texts)
    return open_mixed(data, config.seed, partial(_open, texts, preparation))


def _open(
    texts: "Texts", preparation: Preparation, data: CaptionedImages | TextPairs, seed: int
) -> tuple[SampleSource, SampleSource]:
    if isinstance(data, CaptionedImages):
        train_images, eval_images = open_captioned(data, preparation, texts.of_images, seed)
        return train_images, eval_images
    columns = [data.query_column, data.passage_column, *data.negative_columns]
    fields = ["query_column", "passage_column", *["negative_columns"] * len(data.negative_columns)]
    uses = {column: Use(field) for column, field in zip(columns, fields, strict=True)}
    prefixes = [data.query_prefix, *[data.passage_prefix] * (len(columns) - 1)]
    splits = zip(open_splits(data, preparation, uses), (data.train_split, data.eval_split), strict=True)
    train, evaluation = (_checked(rows.select_columns(columns), split) for rows, split in splits)
    return TextPairSource(train, texts, prefixes), TextPairSource(evaluation, texts, prefixes)


def _headings(data: Headings, texts: "Texts") -> tuple[SampleSource, SampleSource]:
    """Evaluation has evenly spaced pairs."""
    pairs = [{"query": heading, "passage": paragraph} for heading, paragraph in headings()]
    wanted = data.num_train_samples + data.num_eval_samples
    if len(pairs) < wanted:
        raise DataError(f"data.num_train_samples: the reference has {len(pairs)} pairs, not {wanted}; write fewer")
    chosen = np.linspace(0, wanted - 1, data.num_eval_samples).round().astype(int).tolist()
    rest = sorted({*range(wanted)} - {*chosen})
    return TextPairSource([pairs[n] for n in rest], texts), TextPairSource([pairs[n] for n in chosen], texts)


class Texts:
    """Turns texts into tokens of the recipe's tokenizer."""

    def __init__(self, config: Config):
        name = config.data.tokenizer
        self._tokenizer = load_tokenizer(name)
        self._max_tokens = config.data.max_tokens
        check_vocabulary(config.model.vocab_size, self._tokenizer.vocab_size, repr(name))
        end = self._tokenizer.end_of_text
        if isinstance(config.model, ImageText) and config.model.end_of_text != end:
            raise DataError(f"model.end_of_text: {config.model.end_of_text}, but texts of {name!r} end with {end}")

    def encode(self, texts: Sequence[str]) -> Batch:
        """ "input_ids" and their "mask", shape (texts, max_tokens); the end-of-text token fills up shorter texts."""
        end = self._tokenizer.end_of_text
        tokens = torch.full((len(texts), self._max_tokens), end)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for number, encoded in enumerate(self._tokenizer.encode(list(texts))):
            # What is cut off is text, never the end.
            whole = [*self._tokenizer.prefix, *encoded[:-1]][: self._max_tokens - 1]
            tokens[number, : len(whole)] = torch.tensor(whole, dtype=torch.int64)
            mask[number, : len(whole) + 1] = True
        return {"input_ids": tokens, "mask": mask}

    def of_images(self, captions: Sequence[str], kinds: Sequence[object] | None = None) -> Batch:
        """The captions of some images, with the ids of the pairs: equal for equal captions, or for equal `kinds`."""
        encoded = {name: values.unsqueeze(1) for name, values in self.encode(captions).items()}
        return {**encoded, "ids": torch.tensor([[text_id(kind)] * 2 for kind in kinds or captions])}


class DigitPairs:
    """Images of digits with their names; for training, in the words of a template that is drawn in every epoch."""

    def __init__(self, images: TensorImages, texts: Texts, seed: int | None):
        self.images = images
        self.texts = texts
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        batch = self.images.fetch(indices, epoch)
        labels = batch["labels"]
        drawn = [
            0 if self.seed is None or epoch is None else derive_seed(self.seed, "template", epoch, index)
            for index in indices.tolist()
        ]
        texts = [
            TEMPLATES[number % len(TEMPLATES)].format(DIGIT_NAMES[label])
            for number, label in zip(drawn, labels.tolist(), strict=True)
        ]
        # All texts about a digit say the same.
        return {**batch, **self.texts.of_images(texts, labels.tolist())}

    def weight(self, batch: Batch) -> int:
        return len(batch["labels"])


class TextPairSource:
    """Queries, their passages and hard negatives.

    Args:
        rows: The texts of a row by their column, in this order.
        texts: Turns them into tokens.
        prefixes: What the texts of each column begin with.
    """

    def __init__(self, rows: Any, texts: Texts, prefixes: Sequence[str] = ("", "")):
        self.rows = rows
        self.texts = texts
        self.prefixes = prefixes

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        rows = [
            [prefix + text for prefix, text in zip(self.prefixes, self.rows[index].values(), strict=True)]
            for index in indices.tolist()
        ]
        encoded = self.texts.encode([text for row in rows for text in row])
        ids = [[text_id(text) for text in row] for row in rows]
        batch = {name: values.view(len(rows), -1, values.shape[1]) for name, values in encoded.items()}
        return {**batch, "ids": torch.tensor(ids)}

    def weight(self, batch: Batch) -> int:
        return len(batch["ids"])


def _checked(rows: Any, split: str) -> Any:
    """The rows of a `datasets` data set, unless one of their texts is missing or empty."""
    from pyarrow import compute

    for column in rows.column_names:
        texts = rows.data.column(column)
        is_empty = compute.fill_null(compute.equal(compute.utf8_length(texts), 0), True).to_numpy()
        if is_empty.any():
            row = is_empty.argmax()
            raise DataError(f"data: row {row} of {split!r} has no text in {column!r}; remove it, or write the text")
    return rows


def headings() -> list[tuple[str, str]]:
    """Pairs of the headings above a paragraph and the paragraph, of all topics of the reference, sorted by name."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    pairs: dict[str, str] = {}
    for topic in sorted(topics):
        above = topic
        for paragraph in topics[topic].split("\n\n"):
            first, _, rest = paragraph.strip().partition("\n")
            if UNDERLINE.fullmatch(rest.partition("\n")[0]):
                above = first
            elif len(paragraph) >= SHORTEST:
                # The same paragraphs are in several topics.
                pairs.setdefault(" ".join(paragraph.split()), above)
    return [(above, paragraph) for paragraph, above in pairs.items()]


class Prompts:
    """Every class's name in every template, class by class."""

    def __init__(self, config: Config, zero_shot: ZeroShot):
        self.texts = Texts(config)
        self.num_classes = len(zero_shot.class_names)
        self.prompts = [each.replace("{}", name) for name in zero_shot.class_names for each in zero_shot.templates]

    def __len__(self) -> int:
        return len(self.prompts)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        encoded = self.texts.encode([self.prompts[index] for index in indices.tolist()])
        return {name: values.unsqueeze(1) for name, values in encoded.items()}

    def weight(self, batch: Batch) -> int:
        return len(batch["input_ids"])
