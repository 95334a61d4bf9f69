"""Tokenized prompts with their answers, or conversations, as samples, single or packed."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from largebatch.data.order import Indices
from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX, count_targets
from largebatch.errors import DataError

Encoded = tuple[list[int], list[int], str]
"""The tokens of a pair or conversation; the start and the end of each span of them that is predicted, one after the
other; and why it cannot be used, if it has no tokens."""


def as_columns(rows: Iterable[Encoded]) -> dict[str, list[Any]]:
    """The columns of `Pairs`."""
    tokens, predicted, problems = map(list, zip(*rows, strict=True))
    return {"input_ids": tokens, "predicted": predicted, "num_tokens": [*map(len, tokens)], "problem": problems}


class Pairs:
    """The usable pairs or conversations of a split, in its stored order.

    Args:
        dataset: Rows with the columns of `as_columns`.
        block_size: The most tokens that a row may predict from.
        split: "training" or "evaluation", for messages.
        skip_invalid: Whether to skip unusable rows.
        noun: What a row is, "pair" or "conversation".

    Raises:
        DataError: There are unusable pairs that may not be skipped, or no usable ones.
    """

    def __init__(self, dataset: datasets.Dataset, block_size: int, split: str, skip_invalid: bool, noun: str = "pair"):
        self.noun = noun
        self.dataset = dataset.with_format("arrow")
        lengths = np.asarray(dataset["num_tokens"][:], dtype=np.int64) - 1
        is_empty = lengths < 0
        is_long = lengths > block_size
        self.rows = np.flatnonzero(~is_empty & ~is_long)
        """Place of each pair in the data set."""
        self.lengths = lengths[self.rows]
        """Number of tokens that each pair predicts from."""
        self.remark = None
        if len(self.rows) == len(lengths):
            return
        problems = []
        if is_empty.any():
            first = int(is_empty.argmax())
            what, _, detail = dataset[first]["problem"].partition(": ")
            problems.append((is_empty.sum(), f"{what} (the first is row {first}{detail and ': ' + detail})"))
        if is_long.any():
            what = f"more than data.block_size {block_size:,} tokens to predict from (the first is row "
            problems.append((is_long.sum(), f"{what}{is_long.argmax()}, the longest has {lengths.max():,})"))
        among = f" of {len(lengths):,} {split} {noun}s"
        parts = []
        for count, what in problems:
            parts.append(f"{count:,}{among} {'has' if count == 1 else 'have'} {what}")
            among = ""
        self.remark = " and ".join(parts)
        if not skip_invalid or not len(self.rows):
            remedies = ["correct the data", *(["raise data.block_size"] if is_long.any() else [])]
            if len(self.rows):
                raise DataError(f'data.on_invalid: {self.remark}; {", ".join(remedies)}, or write "skip"')
            raise DataError(f"{self.remark}, so none is left; {' or '.join(remedies)}")
        self.remark += ": skipped"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: NDArray[np.int64]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each pair's inputs, the label of each input, and its position, all int64 of shape (tokens,)."""
        rows = self.dataset[self.rows[numbers]].to_pydict()
        pairs = []
        for row, bounds in zip(rows["input_ids"], rows["predicted"], strict=True):
            tokens = torch.tensor(row)
            labels = torch.full_like(tokens, IGNORE_INDEX)
            for start, end in zip(bounds[::2], bounds[1::2], strict=True):
                labels[start:end] = tokens[start:end]
            # A label stands where the token before it is read.
            pairs.append((tokens[:-1], labels[1:], torch.arange(len(row) - 1)))
        return pairs


def starts_of_packs(lengths: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """The first pair of each pack, and at the end the number of pairs.

    A pack has as many consecutive pairs as `block_size` tokens hold; no pair is longer. Packs depend only on the
    lengths, so they are the same on any number of processes, and the first packs have the first pairs.
    """
    starts = []
    room = 0
    for number, length in enumerate(lengths.tolist()):
        if length > room:
            starts.append(number)
            room = block_size
        room -= length
    return np.array([*starts, len(lengths)])


@dataclass(eq=False)
class PairSamples:
    """Samples of one or more consecutive pairs, padded to the longest of their batch.

    Raises:
        DataError: There are too few samples.
    """

    pairs: Pairs
    num_samples: int  # how many samples to use
    field: str  # the config's field for that number
    pack_size: int | None = None  # the most tokens in a pack; None means one pair per sample

    def __post_init__(self) -> None:
        lengths = self.pairs.lengths
        self.starts = starts_of_packs(lengths, self.pack_size) if self.pack_size else np.arange(len(lengths) + 1)
        self.num_available = len(self.starts) - 1
        self.remark = self.pairs.remark
        if self.num_available < self.num_samples:
            found = f"the data has only {len(lengths)} {self.pairs.noun}s"
            if self.pack_size:
                found += f", which make {self.num_available} packs of at most {self.pack_size} tokens"
            raise DataError(f"{self.field}: {self.num_samples}, but {found}; write at most {self.num_available}")

    def __len__(self) -> int:
        return self.num_samples

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        ranges = [np.arange(self.starts[index], self.starts[index + 1]) for index in indices]
        pairs = iter(self.pairs.read(np.concatenate(ranges)))
        samples = []
        for numbers in ranges:
            parts = zip(*islice(pairs, len(numbers)), strict=True)
            samples.append([torch.cat(part) for part in parts])
        inputs, labels, positions = map(list, zip(*samples, strict=True))
        batch = {
            "input_ids": pad_sequence(inputs, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
        }
        if self.pack_size:
            # At position 0, each padding token is its own pair, to which no other token attends.
            batch["position_ids"] = pad_sequence(positions, batch_first=True)
        return batch

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)
