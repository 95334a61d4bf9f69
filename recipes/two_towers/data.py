"""Pairs: an image and its text, or a query, its passage and hard negatives.

Batches are {"input_ids": int64 (batch, texts, max_tokens), "mask": bool of that shape, "ids": int64 (batch, vectors)},
and for images {"pixel_values": uint8 (batch, channels, height, width), "labels": int64 (batch,)}. What has the same id
is the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from pyarrow import compute, types

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.images import TensorImages, digits
from largebatch.data.mixture import open_mixed
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, SampleSource, Sources
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer
from largebatch.errors import DataError
from largebatch.words import counted

from .config import DIGIT_NAMES, CaptionedImages, Config, Headings, Images, ImageText, NamedDigits, TextPairs
from .images import open_captioned, open_labeled, text_id

TEMPLATES = ("{}", "the digit {}", "a photo of the number {}", "a handwritten {}")
UNDERLINE = re.compile(r"([*=\-~^])\1{2,}")
SHORTEST = 80  # characters of a paragraph that a heading is to be found by


def sources(config: Config, preparation: Preparation) -> tuple[SampleSource, ...]:
    """The training and evaluation pairs, and any labeled images.

    Raises:
        DataError: The data or the tokenizer cannot be loaded or used.
    """
    pairs = open_mixed(config.data, config.seed, partial(_open, Texts(config), preparation))
    return *pairs, *open_labeled(config, preparation)


def _open(texts: "Texts", preparation: Preparation, data: Images | Headings | TextPairs, seed: int) -> Sources:
    if isinstance(data, NamedDigits):
        train_digits, eval_digits = (DigitPairs(each.pixels, each.labels, texts, seed) for each in digits(data))
        return train_digits, eval_digits
    if isinstance(data, Headings):
        return _headings(data, texts)
    if isinstance(data, CaptionedImages):
        train_images, eval_images = open_captioned(data, preparation, texts.of_images, seed)
        return train_images, eval_images
    uses = {data.query_column: Use("query_column"), data.passage_column: Use("passage_column")}
    uses |= {column: Use("negative_columns") for column in data.negative_columns}
    prefixes = [data.query_prefix, *[data.passage_prefix] * (1 + len(data.negative_columns))]
    train, evaluation = (dataset.select_columns([*uses]) for dataset in open_splits(data, preparation, uses))
    for rows, split in ((train, data.train_split), (evaluation, data.eval_split)):
        _check(rows, split)
        if preparation.allowed == "everything":
            passages = np.fromiter((text_id(text.as_py()) for text in rows.data.column(data.passage_column)), np.int64)
            if (number := len(np.unique(passages))) < len(rows):
                print(f"{counted(number, 'different passage')} of {len(rows):,}: a larger batch repeats them")
    return TextPairSource(train, texts, prefixes), TextPairSource(evaluation, texts, prefixes)


def _headings(data: Headings, texts: "Texts") -> Sources:
    """Evaluation has evenly spaced pairs."""
    pairs = headings()
    wanted = data.num_train_samples + data.num_eval_samples
    if len(pairs) < wanted:
        raise DataError(f"data.num_train_samples: the reference has {len(pairs)} pairs, not {wanted}; write fewer")
    chosen = np.linspace(0, wanted - 1, data.num_eval_samples).round().astype(int)
    rest = np.setdiff1d(np.arange(wanted), chosen)
    train, evaluation = (TextPairSource([pairs[number] for number in numbers], texts) for numbers in (rest, chosen))
    return train, evaluation


def prompts_of(config: Config) -> "TextPairSource":
    """The name of the first class in every template, that of the second, and so on, a text a sample; there are none
    without zero-shot evaluation."""
    prompts = []
    if config.zero_shot:
        for name, template in product(config.zero_shot.class_names, config.zero_shot.templates):
            prompts.append({"prompt": template.replace("{}", name)})
    return TextPairSource(prompts, Texts(config), [""])


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

    def encode(self, rows: Sequence[Sequence[str]]) -> Batch:
        """Rows of equally many texts: "input_ids" and their "mask", shape (rows, texts, max_tokens), and "ids", shape
        (rows, texts), which are the same for equal texts; the end-of-text token fills up shorter texts."""
        texts = [text for row in rows for text in row]
        tokenizer = self._tokenizer
        size = self._max_tokens
        # What is cut off is text, never the end.
        whole = [[*tokenizer.prefix, *tokens[:-1]][: size - 1] for tokens in tokenizer.encode([*texts])]
        lengths = torch.tensor([[len(tokens)] for tokens in whole])
        flat = {
            "input_ids": torch.tensor([tokens + [tokenizer.end_of_text] * (size - len(tokens)) for tokens in whole]),
            "mask": torch.arange(size) <= lengths,
            "ids": torch.tensor([text_id(text) for text in texts]),
        }
        return {name: values.view(len(rows), -1, *values.shape[1:]) for name, values in flat.items()}

    def of_images(self, captions: Sequence[str]) -> Batch:
        """The captions of some images; an image's id is that of its caption."""
        encoded = self.encode([[caption] for caption in captions])
        return {**encoded, "ids": encoded["ids"].repeat(1, 2)}


@dataclass(eq=False)
class DigitPairs(TensorImages):
    """Images of digits with their names; for training, in the words of a template that is drawn in every epoch."""

    texts: Texts
    seed: int

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        batch = super().fetch(indices, epoch)
        names = []
        for index, label in zip(indices.tolist(), batch["labels"].tolist(), strict=True):
            drawn = 0 if epoch is None else derive_seed(self.seed, "template", epoch, index)
            names.append([TEMPLATES[drawn % len(TEMPLATES)].format(DIGIT_NAMES[label])])
        # All texts about a digit say the same.
        return {**batch, **self.texts.encode(names), "ids": batch["labels"].unsqueeze(1).repeat(1, 2)}


@dataclass(eq=False)
class TextPairSource:
    """Queries, their passages and hard negatives."""

    rows: Any
    """The texts of a row by their column, in this order."""
    texts: Texts
    prefixes: Sequence[str] = ("", "")
    """What the texts of each column begin with."""

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        rows = [self.rows[index].values() for index in indices.tolist()]
        return self.texts.encode(
            [[prefix + text for prefix, text in zip(self.prefixes, row, strict=True)] for row in rows]
        )

    def weight(self, batch: Batch) -> int:
        return len(batch["ids"])


def _check(rows: Any, split: str) -> None:
    """Raise DataError if a text of a `datasets` data set is missing, empty or no text."""
    for column in rows.column_names:
        texts = rows.data.column(column)
        is_text = types.is_string(texts.type) or types.is_large_string(texts.type)
        row = compute.index(compute.fill_null(texts, ""), "").as_py() if is_text else 0
        if row >= 0:
            raise DataError(f"data: row {row} of {split!r} has no text in {column!r}; remove it, or write the text")


def headings() -> list[dict[str, str]]:
    """Pairs of the headings above a paragraph and the paragraph, of all topics of the reference, sorted by name."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    pairs: dict[str, str] = {}
    for above, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            first, _, rest = paragraph.strip().partition("\n")
            if UNDERLINE.fullmatch(rest.partition("\n")[0]):
                above = first
            elif len(paragraph) >= SHORTEST:
                # The same paragraphs are in several topics.
                pairs.setdefault(" ".join(paragraph.split()), above)
    return [{"query": above, "passage": paragraph} for paragraph, above in pairs.items()]
