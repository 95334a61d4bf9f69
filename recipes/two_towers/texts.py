"""Texts as tokens of the recipe's tokenizer."""

from collections.abc import Sequence

import torch
import xxhash

from largebatch.data.source import Batch
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer
from largebatch.errors import DataError

from .config import Config, ImageText


class Texts:
    """Turns texts into tokens of the recipe's tokenizer."""

    def __init__(self, config: Config):
        name = config.data.tokenizer
        self._tokenizer = load_tokenizer(name)
        self._max_tokens = config.data.max_tokens
        check_vocabulary(config.model.vocab_size, self._tokenizer.vocab_size, repr(name))
        # What the tokens depend on, besides the texts.
        self.fingerprint = f"{self._tokenizer.fingerprint} {self._max_tokens}"
        end = self._tokenizer.end_of_text
        if isinstance(config.model, ImageText) and config.model.end_of_text != end:
            raise DataError(f"model.end_of_text: {config.model.end_of_text}, but texts of {name!r} end with {end}")

    def check(self, text: str, where: str) -> None:
        """Raise DataError if a text of the data has a special token, which would be obeyed."""
        if token := self._tokenizer.special_token_in(text):
            raise DataError(
                f"{where} has {token!r}, which the tokenizer reads as a special token; write it otherwise, or remove it"
            )

    def encode(self, rows: Sequence[Sequence[str]]) -> Batch:
        """Rows of equally many texts: "input_ids" and their "mask", shape (rows, texts, max_tokens), and "ids", shape
        (rows, texts), which are the same for texts of the same tokens; the end-of-text token fills up shorter ones."""
        texts = [text for row in rows for text in row]
        tokenizer = self._tokenizer
        size = self._max_tokens
        # What is cut off is text, never the end.
        whole = [[*tokenizer.prefix, *tokens[:-1]][: size - 1] for tokens in tokenizer.encode([*texts])]
        lengths = torch.tensor([[len(tokens)] for tokens in whole])
        flat = {
            "input_ids": torch.tensor([tokens + [tokenizer.end_of_text] * (size - len(tokens)) for tokens in whole]),
            "mask": torch.arange(size) <= lengths,
            "ids": torch.tensor([xxhash.xxh3_64_intdigest(str(tokens).encode()) - 2**63 for tokens in whole]),
        }
        return {name: values.view(len(rows), -1, *values.shape[1:]) for name, values in flat.items()}

    def of_images(self, captions: Sequence[str]) -> Batch:
        """The captions of some images; an image's id is that of its caption."""
        encoded = self.encode([[caption] for caption in captions])
        return {**encoded, "ids": encoded["ids"].repeat(1, 2)}
