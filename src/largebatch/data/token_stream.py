"""Tokens of documents, one document after another, in memory or in memory-mapped files."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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


class Part(NamedTuple):
    """Some tokens, which are opened when they are read."""

    num_tokens: int
    tokens: Callable[[], Array]  # of shape (tokens,)


class TokenStream:
    """The tokens of all documents.

    Args:
        parts: The parts of the stream, in order.
        vocab_size: Every token that is read must be below it; None for tokens that are known to be.
        remark: What is unusual about them, for people.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int | None = None, remark: str | None = None):
        self.remark = remark
        self._parts = parts
        self._vocab_size = vocab_size
        self._starts = np.cumsum([0, *(part.num_tokens for part in parts)])

    @classmethod
    def in_memory(cls, tokens: Array) -> "TokenStream":
        """A stream of one part."""
        return cls([Part(len(tokens), lambda: tokens)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`; DataError if one is not in the vocabulary."""
        pieces = []
        part = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first = int(self._starts[part])
            pieces.append(self._parts[part].tokens()[start - first : stop - first])
            start += len(pieces[-1])
            part += 1
        tokens = np.concatenate(pieces, dtype=np.int64)
        if self._vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DataError(
                f"the data has token {max(tokens, key=abs)}, but data.tokenizer has only {self._vocab_size}; write the "
                "tokenizer that the data was made with, or make the data again if it is damaged"
            )
        return tokens
