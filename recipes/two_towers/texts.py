"""Texts as tokens of the recipe's tokenizer."""

from collections.abc import Sequence
from itertools import takewhile
from operator import countOf

import numpy as np
import torch
import xxhash

from largebatch.data.order import Indices
from largebatch.data.source import Batch
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer
from largebatch.errors import DataError

from .config import Config, ImageText

FORMAT = "4"
"""Another number where other texts are accepted."""


class Texts:
    """Turns texts into tokens of the recipe's tokenizer."""

    def __init__(self, config: Config):
        name = config.data.tokenizer
        self._tokenizer = load_tokenizer(name)
        self.special_token_in = self._tokenizer.special_token_in
        self._max_tokens = config.data.max_tokens
        check_vocabulary(config.model.vocab_size, self._tokenizer.vocab_size, repr(name))
        # What the tokens depend on, besides the texts.
        self.fingerprint = f"{FORMAT} {self._tokenizer.fingerprint} {self._max_tokens}"
        end = self._tokenizer.end_of_text
        if isinstance(config.model, ImageText) and config.model.end_of_text != end:
            raise DataError(f"model.end_of_text: {config.model.end_of_text}, but texts of {name!r} end with {end}")

    def knows(self, text: str) -> bool:
        """Whether the tokenizer knows more than half of a text."""
        ((*tokens, _),) = self._tokenizer.encode([text])
        return 2 * countOf(tokens, self._tokenizer.unknown_token) < len(tokens)

    def tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text without its end: what is cut off is text, never the end."""
        prefix = self._tokenizer.prefix
        encoded = self._tokenizer.encode([*texts])
        return [[*prefix, *tokens[:-1]][: self._max_tokens - 1] for tokens in encoded]

    def ids(self, texts: Sequence[str]) -> Indices:
        """A number for each text, the same for texts of the same tokens."""
        return np.array([number(str(tokens).encode()) for tokens in self.tokens_of(texts)])

    def encode(self, rows: Sequence[Sequence[str]], prefixes: Sequence[str] = ("",)) -> Batch:
        """Rows of a text for each of the prefixes, with which they begin: "input_ids" and their "mask", shape (rows,
        texts, max_tokens), and "ids", shape (rows, texts), which are the same for texts of the same tokens behind the
        prefix; the end-of-text token fills up shorter ones."""
        texts = self.tokens_of([prefix + text for row in rows for prefix, text in zip(prefixes, row, strict=True)])
        begins = self.tokens_of(prefixes) * len(rows)
        size = self._max_tokens
        end = self._tokenizer.end_of_text
        ids = []
        for tokens, begin in zip(texts, begins, strict=True):
            # Not of the prefix's length: before a text, its last token may be another one.
            shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(tokens, begin, strict=False))])
            ids.append(number(str(tokens[shared:]).encode()))
        flat = {
            "input_ids": torch.tensor([tokens + [end] * (size - len(tokens)) for tokens in texts]),
            "mask": torch.arange(size) <= torch.tensor([[len(tokens)] for tokens in texts]),
            "ids": torch.tensor(ids),
        }
        return {name: values.view(len(rows), -1, *values.shape[1:]) for name, values in flat.items()}


def number(content: bytes) -> int:
    """A number for some bytes, the same for the same ones."""
    return xxhash.xxh3_64_intdigest(content) - 2**63
