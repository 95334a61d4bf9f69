"""Tokens of documents, one document after another, in memory or in memory-mapped files."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import DataError

Array = NDArray[np.integer]
MAX_MAPS = 512  # of a process; each has a file descriptor


@lru_cache(maxsize=MAX_MAPS)
def mapped(file: Path, dtype: str, offset: int = 0, length: int | None = None) -> Array:
    """Numbers in a file, from a byte on; the maps that were used last stay open.

    Raises:
        ValueError: The file has fewer.
    """
    return np.memmap(file, dtype, "r", offset, None if length is None else (length,))


class TokenStream:
    """The tokens of all documents, in parts, each of which is opened when it is read.

    Args:
        num_tokens: Number of tokens in each part.
        num_documents: Number of documents in each part.
        open_tokens: Opens a part by its number: its tokens, integers of shape (tokens,).
        open_ends: Opens the places among them where its documents end, in order, integers of shape (documents,).
        vocab_size: Every token that is read must be below it; None for tokens that are known to be.
    """

    def __init__(
        self,
        num_tokens: Sequence[int],
        num_documents: Sequence[int],
        open_tokens: Callable[[int], Array],
        open_ends: Callable[[int], Array],
        vocab_size: int | None = None,
    ):
        self._starts = np.cumsum([0, *num_tokens])
        self._first_documents = np.cumsum([0, *num_documents])
        self._tokens, self._ends, self._vocab_size = open_tokens, open_ends, vocab_size

    @classmethod
    def in_memory(cls, tokens: Array, ends: Sequence[int] = ()) -> "TokenStream":
        """A stream of one part; `ends` may be left out where only blocks are read."""
        return cls([len(tokens)], [len(ends)], partial(_the_same, tokens), partial(_the_same, np.asarray(ends)))

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self._first_documents[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`; DataError if one is not in the vocabulary."""
        pieces = []
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first = int(self._starts[part])
            pieces.append(self._tokens(part)[start - first : stop - first])
            start += len(pieces[-1])
            part += 1
        return self._checked(np.concatenate(pieces, dtype=np.int64))

    def read_document(self, number: int, max_tokens: int) -> NDArray[np.int64]:
        """The first tokens of a document, at most so many; DataError as `read`."""
        part = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        ends, place = self._ends(part), number - int(self._first_documents[part])
        start = int(ends[place - 1]) if place else 0
        return self._checked(self._tokens(part)[start : min(int(ends[place]), start + max_tokens)].astype(np.int64))

    def lengths(self) -> NDArray[np.integer]:
        """The number of tokens of each document."""
        return np.concatenate([np.diff(self._ends(part), prepend=0) for part in range(len(self._starts) - 1)])

    def _checked(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._vocab_size is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DataError(
                f"the data has token {max(tokens, key=abs)}, but data.tokenizer has only {self._vocab_size}; write the "
                "tokenizer that the data was made with, or make the data again if it is damaged"
            )
        return tokens


def _the_same(array: Array, _: int) -> Array:
    return array
