"""Tokenized prompts with their answers, or conversations, as samples, single or packed."""

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from largebatch.data.order import Indices
from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX, count_targets
from largebatch.errors import DataError

if TYPE_CHECKING:
    import datasets


class Pairs:
    """The usable pairs or conversations of a split, in its stored order.

    Args:
        dataset: Rows of tokens "input_ids", none in unusable ones, whose reason is "problem"; "predicted" has the start
            and the end of each span that is predicted, one after the other.
        block_size: The most tokens that a row may predict from.
        split: "training" or "evaluation", for messages.
        skip_invalid: Whether to skip unusable rows.
        noun: What a row is, "pair" or "conversation".

    Raises:
        DataError: There are unusable pairs that may not be skipped, or no usable ones.
    """

    def __init__(
        self, dataset: "datasets.Dataset", block_size: int, split: str, skip_invalid: bool, noun: str = "pair"
    ):
        self.noun = noun
        self.dataset = dataset.with_format("arrow")
        num_tokens = np.asarray(dataset["num_tokens"][:], dtype=np.int64)
        is_empty = num_tokens == 0
        is_long = num_tokens - 1 > block_size
        self.rows = np.flatnonzero(~is_empty & ~is_long)
        """Place of each pair in the data set."""
        self.lengths = num_tokens[self.rows] - 1
        """Number of tokens that each pair predicts from."""
        self.remark = None
        if len(self.rows) == len(num_tokens):
            return
        problems = []
        if is_empty.any():
            first = int(is_empty.argmax())
            what, _, detail = dataset[first]["problem"].partition(": ")
            problems.append((is_empty, f"{what} (the first is row {first}{detail and ': ' + detail})"))
        if is_long.any():
            what = f"more than data.block_size {block_size:,} tokens to predict from (the first is row "
            problems.append((is_long, f"{what}{is_long.argmax()}, the longest has {num_tokens.max() - 1:,})"))
        among = f"of {len(num_tokens):,} {split} {noun}s "
        self.remark = " and ".join(
            f"{chosen.sum():,} {among if number == 0 else ''}{'has' if chosen.sum() == 1 else 'have'} {what}"
            for number, (chosen, what) in enumerate(problems)
        )
        if not skip_invalid or not len(self.rows):
            remedies = ["correct the data", *(["raise data.block_size"] if is_long.any() else [])]
            if len(self.rows):
                raise DataError(f'data.on_invalid: {self.remark}; {", ".join(remedies)}, or write "skip"')
            raise DataError(f"{self.remark}, so none is left; {' or '.join(remedies)}")
        self.remark += ": skipped"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: NDArray[np.int64]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each pair's inputs and the label of each input, both int64 of shape (tokens,)."""
        rows = self.dataset[self.rows[numbers]].to_pydict()
        pairs = []
        for tokens, bounds in zip(rows["input_ids"], rows["predicted"], strict=True):
            inputs = torch.tensor(tokens[:-1])
            targets = torch.tensor(tokens[1:])
            labels = torch.full_like(targets, IGNORE_INDEX)
            for start, end in zip(bounds[::2], bounds[1::2], strict=True):
                # A label stands where the token before it is read.
                span = slice(max(start - 1, 0), end - 1)
                labels[span] = targets[span]
            pairs.append((inputs, labels))
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


class PairSamples:
    """Samples of one or more consecutive pairs, padded to the longest of their batch.

    Args:
        pairs: The pairs.
        num_samples: Number of samples to use.
        field: The config's field for `num_samples`, for the error.
        pack_size: The most tokens in a pack; None means one pair per sample.

    Raises:
        DataError: There are too few samples.
    """

    def __init__(self, pairs: Pairs, num_samples: int, field: str, pack_size: int | None = None):
        self.pairs = pairs
        self.num_samples = num_samples
        self.packed = pack_size is not None
        self.starts = starts_of_packs(pairs.lengths, pack_size) if pack_size else np.arange(len(pairs) + 1)
        self.num_available = len(self.starts) - 1
        self.remark = pairs.remark
        if self.num_available < num_samples:
            found = f"the data has only {len(pairs)} {pairs.noun}s"
            if pack_size:
                found += f", which make {self.num_available} packs of at most {pack_size} tokens"
            raise DataError(f"{field}: {num_samples}, but {found}; write at most {self.num_available}")

    def __len__(self) -> int:
        return self.num_samples

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        ranges = [np.arange(self.starts[index], self.starts[index + 1]) for index in indices]
        pairs = iter(self.pairs.read(np.concatenate(ranges)))
        samples = [list(islice(pairs, len(numbers))) for numbers in ranges]
        longest = max(sum(len(inputs) for inputs, _ in sample) for sample in samples)
        shape = (len(samples), longest)
        batch = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.full(shape, IGNORE_INDEX)}
        if self.packed:
            # At position 0, each padding token is its own pair, to which no other token attends.
            batch["position_ids"] = torch.zeros(shape, dtype=torch.int64)
        for row, sample in enumerate(samples):
            start = 0
            for inputs, labels in sample:
                place = slice(start, start + len(inputs))
                batch["input_ids"][row, place] = inputs
                batch["labels"][row, place] = labels
                if self.packed:
                    batch["position_ids"][row, place] = torch.arange(len(inputs))
                start += len(inputs)
        return batch

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)
