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
from datasets.fingerprint import Hasher

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.images import TensorImages, digits
from largebatch.data.mixture import open_mixed
from largebatch.data.not_text import not_text_in
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation, kept
from largebatch.data.source import Batch, Sources
from largebatch.errors import DataError
from largebatch.words import counted

from .config import DIGIT_NAMES, CaptionedImages, Config, Headings, Images, NamedDigits, TextPairs
from .images import open_captioned, open_labeled
from .texts import Texts

TEMPLATES = ("{}", "the digit {}", "a photo of the number {}", "a handwritten {}")
ROWS_AT_ONCE = 1000
UNDERLINE = re.compile(r"([*=\-~^])\1{2,}")
SHORTEST = 80  # characters of a paragraph that a heading is to be found by


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training and evaluation pairs, and any labeled images.

    Raises:
        DataError: The data or the tokenizer cannot be loaded or used.
    """
    pairs = open_mixed(config.data, config.seed, partial(_open, Texts(config), preparation))
    return *pairs, *open_labeled(config, preparation)


def _open(texts: Texts, preparation: Preparation, data: Images | Headings | TextPairs, seed: int) -> Sources:
    if isinstance(data, NamedDigits):
        return tuple(DigitPairs(each.pixels, each.labels, texts, seed) for each in digits(data))
    if isinstance(data, Headings):
        return _headings(data, texts)
    if isinstance(data, CaptionedImages):
        return tuple(open_captioned(data, preparation, texts, seed))
    uses = {data.query_column: Use("query_column"), data.passage_column: Use("passage_column")}
    uses |= {column: Use("negative_columns") for column in data.negative_columns}
    prefixes = [data.query_prefix, *[data.passage_prefix] * (1 + len(data.negative_columns))]
    pairs = []
    for dataset, split in zip(open_splits(data, preparation, uses), (data.train_split, data.eval_split), strict=True):
        rows = dataset.select_columns([*uses])
        pairs.append(TextPairSource(rows, texts, prefixes, _try_texts(rows, split, data, texts, preparation)))
    return tuple(pairs)


def _headings(data: Headings, texts: Texts) -> Sources:
    """Evaluation has evenly spaced pairs."""
    pairs = headings()[: data.num_train_samples + data.num_eval_samples]
    chosen = np.linspace(0, len(pairs) - 1, data.num_eval_samples).round().astype(int)
    rest = np.setdiff1d(np.arange(len(pairs)), chosen)
    return tuple(TextPairSource([pairs[number] for number in numbers], texts) for numbers in (rest, chosen))


def prompts_of(config: Config) -> "TextPairSource":
    """The name of the first class in every template, that of the second, and so on, a text a sample; there are none
    without zero-shot evaluation."""
    prompts = []
    if config.zero_shot:
        for name, template in product(config.zero_shot.class_names, config.zero_shot.templates):
            prompts.append({"prompt": template.replace("{}", name)})
    return TextPairSource(prompts, Texts(config), [""])


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
    remark: str | None = None
    """How many passages differ, if some are the same, and how many texts have special or mostly unknown tokens."""

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        return self.texts.encode([[*self.rows[index].values()] for index in indices.tolist()], self.prefixes)

    def weight(self, batch: Batch) -> int:
        return len(batch["ids"])


def _try_texts(rows: Any, split: str, data: TextPairs, texts: Texts, preparation: Preparation) -> str | None:
    """Try each text once, as `images` does with captions; what to tell of them.

    Raises:
        DataError: A text is missing, empty or no text.
    """

    def counts() -> Indices:
        """The number of different passages, and of texts that are misread; the row of the first of these."""
        preparation.check(data, rows.data.nbytes)
        misread = []
        for column in rows.column_names:
            for row, value in enumerate(rows.data.column(column)):
                where = f"data: row {row} of {split!r}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    raise DataError(f"{where} has text in {column!r} that is not UTF-8: {error}") from error
                if not isinstance(text, str) or not text.strip():
                    raise DataError(f"{where} has no text in {column!r}; remove it, or write the text")
                if wrong := not_text_in(text):
                    raise DataError(f"{where} has {wrong} in {column!r}, which is not text; remove it")
                if texts.special_token_in(text) or not texts.knows(text):
                    misread.append(row)
        ids = [
            texts.ids([data.passage_prefix + passage for passage in some[data.passage_column]])
            for some in rows.select_columns(data.passage_column).iter(ROWS_AT_ONCE)
        ]
        return np.array([len(np.unique(np.concatenate(ids))), len(misread), min(misread, default=0)])

    what = [rows._fingerprint, rows.column_names, data.passage_prefix, texts.fingerprint]
    num_different, num_misread, first = kept(f"texts_{Hasher.hash(what)}", counts).tolist()
    remarks = []
    if num_different < len(rows):
        remarks.append(f"{counted(num_different, 'different passage')} of {len(rows):,}: a larger batch repeats them")
    if num_misread:
        told = f"with special or mostly unknown tokens (the first is row {first})"
        remarks.append(f"{counted(num_misread, 'text')} {told}")
    return "; ".join(remarks) or None


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
