"""Tokenized prompts with their answers as samples: one by one, or packed."""

from itertools import islice

import datasets
import numpy as np
import torch
from numpy.typing import NDArray

from largebatch.data.order import Indices
from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX, count_targets
from largebatch.errors import DataError


class Pairs:
    """The usable pairs of a split, in its stored order.

    Args:
        dataset: Rows of tokens "input_ids", empty where a prompt or an answer is, and of these "num_prompt" that are
            the prompt's.
        block_size: Tokens that a pair may predict from at most.
        split: "training" or "evaluation", for messages.
        leave_out: Whether pairs that cannot be used are left out.

    Raises:
        DataError: There are such pairs, and they are not to be left out; or there are no others.
    """

    def __init__(self, dataset: datasets.Dataset, block_size: int, split: str, leave_out: bool):
        self.dataset = dataset.with_format("arrow")
        num_tokens = np.asarray(dataset["num_tokens"][:], dtype=np.int64)
        is_empty, is_long = num_tokens == 0, num_tokens - 1 > block_size
        self.rows = np.flatnonzero(~is_empty & ~is_long)
        """Place of each pair in the data set."""
        self.lengths = num_tokens[self.rows] - 1
        """Tokens that each pair predicts from."""
        self.remark = None
        if len(self.rows) == len(num_tokens):
            return
        problems = []
        if is_empty.any():
            problems.append(f"{is_empty.sum():,} have an empty prompt or answer (the first is row {is_empty.argmax()})")
        if is_long.any():
            problems.append(
                f"{is_long.sum():,} have more than data.block_size {block_size:,} tokens to predict from (the first is "
                f"row {is_long.argmax()}, the longest has {num_tokens.max() - 1:,})"
            )
        self.remark = f"of {len(num_tokens):,} {split} pairs {' and '.join(problems)}"
        if not leave_out or not len(self.rows):
            remedies = ["correct the data", *(["raise data.block_size"] if is_long.any() else [])]
            if len(self.rows):
                raise DataError(f'data.on_invalid: {self.remark}; {", ".join(remedies)}, or write "skip"')
            raise DataError(f"{self.remark}, so that none is left; {' or '.join(remedies)}")
        self.remark += ": left out"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: NDArray[np.int64]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each pair what is read, and what is predicted from each of these tokens; int64, shape (tokens,) both."""
        rows = self.dataset[self.rows[numbers]].to_pydict()
        pairs = []
        for tokens, num_prompt in zip(rows["input_ids"], rows["num_prompt"], strict=True):
            labels = torch.tensor(tokens[1:])
            labels[: num_prompt - 1] = IGNORE_INDEX
            pairs.append((torch.tensor(tokens[:-1]), labels))
        return pairs


def starts_of_packs(lengths: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Cut pairs, in their order, into packs of as many as `block_size` tokens hold.

    It depends on the lengths alone, so packs are the same on any number of processes, and the first packs are those of
    the first pairs.

    Args:
        lengths: Tokens of each pair, none above `block_size`.
        block_size: Tokens of a pack at most.

    Returns:
        The first pair of each pack, and the number of pairs.
    """
    starts, room = [], 0
    for number, length in enumerate(lengths.tolist()):
        if length > room:
            starts.append(number)
            room = block_size
        room -= length
    return np.array([*starts, len(lengths)])


class PairSamples:
    """Samples of one or more pairs that follow one another, padded to the longest of their batch.

    Args:
        pairs: The pairs.
        num_samples: Samples to use.
        field: Where `num_samples` stands in the config, for the error.
        pack_size: Tokens of a pack at most; None is one pair a sample.

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
            what = f"make {self.num_available} packs of at most {pack_size} tokens" if pack_size else "are fewer"
            raise DataError(
                f"{field}: {num_samples}, but the data's {len(pairs)} pairs {what}; write at most {self.num_available}"
            )

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
            # At 0, each token of the padding is a pair of its own, which no other sees.
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
