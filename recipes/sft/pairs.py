"""Tokenized prompts with their answers, or conversations, as samples, single or packed."""

from collections.abc import Iterable
from functools import partial
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

from .config import AdditionData, HubPairs


class PairSamples:
    """The usable pairs or conversations of a split, in their stored order: single ones or, for training with packing,
    packs of consecutive ones. Samples are padded to the longest of their batch.

    Args:
        dataset: Rows with the columns of `Encoder`.
        data: The section.
        split: What the samples are for, "training" or "evaluation".

    Raises:
        DataError: There are unusable pairs that may not be skipped, or no usable ones.
    """

    def __init__(self, dataset: datasets.Dataset, data: AdditionData | HubPairs, split: str):
        self.dataset = dataset.with_format("arrow")
        lengths = np.asarray(dataset["num_tokens"][:], dtype=np.int64) - 1
        is_empty = lengths < 0
        is_long = lengths > data.block_size
        self.rows = np.flatnonzero(~is_empty & ~is_long)
        """Place of each pair in the data set."""
        self.lengths = lengths[self.rows]
        """Number of tokens that each pair predicts from."""
        problems = []
        remedies = "correct the data"
        if is_empty.any():
            first = int(is_empty.argmax())
            problems.append(
                f"{is_empty.sum():,} cannot be used (the first is row {first}: {dataset[first]['problem']})"
            )
        if is_long.any():
            problems.append(
                f"{is_long.sum():,} would predict from more than data.block_size {data.block_size:,} tokens (the first "
                f"is row {is_long.argmax()}, the longest from {lengths.max():,})"
            )
            remedies += " or raise data.block_size"
        self.remark = ""
        if problems:
            self.remark = f"of {len(lengths):,} {split} rows, {' and '.join(problems)}"
            if not len(self.rows):
                raise DataError(f"data: {self.remark}, so none is left; {remedies}")
            if data.on_invalid == "refuse":
                raise DataError(f'data.on_invalid: {self.remark}; {remedies}, or write "skip"')
            self.remark += ": skipped"
        self.is_packed = data.packing and split == "training"
        self.starts = np.arange(len(self.rows) + 1)
        if self.is_packed:
            self.starts = starts_of_packs(self.lengths, data.block_size)
        self.num_available = len(self.starts) - 1
        self.num_samples = data.num_train_samples if split == "training" else data.num_eval_samples

    def __len__(self) -> int:
        return min(self.num_samples, self.num_available)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        ranges = [np.arange(self.starts[index], self.starts[index + 1]) for index in indices]
        pairs = iter(self.dataset[self.rows[np.concatenate(ranges)]].to_pylist())
        samples = [_joined(islice(pairs, len(numbers))) for numbers in ranges]
        inputs, labels, positions = map(list, zip(*samples, strict=True))
        padded = partial(pad_sequence, batch_first=True)
        batch = {"input_ids": padded(inputs), "labels": padded(labels, padding_value=IGNORE_INDEX)}
        if self.is_packed:
            # At position 0, each padding token is its own pair, to which no other token attends.
            batch["position_ids"] = padded(positions)
        return batch

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)


def _joined(pairs: Iterable[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """The inputs, labels and positions of some pairs, one pair after the other."""
    parts = []
    for pair in pairs:
        tokens = torch.tensor(pair["input_ids"])
        labels = torch.full_like(tokens, IGNORE_INDEX)
        for start, end in zip(pair["predicted"][::2], pair["predicted"][1::2], strict=True):
            labels[start:end] = tokens[start:end]
        # A label stands where the token before it is read.
        parts.append((tokens[:-1], labels[1:], torch.arange(len(tokens) - 1)))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


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
