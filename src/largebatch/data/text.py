"""Text as blocks of tokens: the Python reference as bytes, or documents through `datasets`.

All documents form one stream of tokens. Sample i is the block_size + 1 tokens from i * block_size on: the model reads
the first block_size and predicts the last block_size, so each token of the stream is predicted once.
"""

from typing import Protocol

import datasets
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from largebatch.config.tasks import CausalLMConfig, HubText, PydocData
from largebatch.data.hub import column, open_splits
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import DataError
from largebatch.order import Indices


def text_sources(config: CausalLMConfig) -> tuple[SampleSource, SampleSource]:
    """The training and evaluation blocks of a recipe.

    Batches are {"input_ids": int64 (batch, block_size), "labels": int64 (batch, block_size)}, the labels being the
    inputs one token later.

    Raises:
        DataError: The data or its tokenizer cannot be loaded, or a split has fewer blocks than the recipe says.
    """
    data = config.data
    if isinstance(data, PydocData):
        return pydoc_blocks(data)
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"model.vocab_size: {config.model.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"{data.tokenizer!r}; write at least {tokenizer.vocab_size}"
        )
    train, evaluation = (ArrowTokens(tokenise(split, data, tokenizer)) for split in open_splits(data))
    return (
        TokenBlocks(train, data.block_size, data.num_train_samples, "data.num_train_samples"),
        TokenBlocks(evaluation, data.block_size, data.num_eval_samples, "data.num_eval_samples"),
    )


# --- tokenising ---------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """Text to tokens; `encode` ends each document with an end-of-text token."""

    vocab_size: int

    def encode(self, documents: list[str | None]) -> list[list[int]]: ...


class ByteTokenizer:
    """UTF-8 bytes; a zero byte ends each document."""

    vocab_size = 256

    def encode(self, documents: list[str | None]) -> list[list[int]]:
        return [[*(document or "").encode(), 0] for document in documents]


class PretrainedTokenizer:
    """A tokenizer of `transformers`, with its own end-of-text token."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise DataError(
                f"data.tokenizer: {path!r} could not be loaded: {reason}; write a hub id, a local folder, or bytes"
            ) from error
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"data.tokenizer: {path!r} has no end-of-text token to put between documents; use another")
        self.vocab_size = len(self.tokenizer)

    def encode(self, documents: list[str | None]) -> list[list[int]]:
        texts = [document or "" for document in documents]
        tokens = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [[*document, self.tokenizer.eos_token_id] for document in tokens]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that the config names: "bytes", a hub id or a local folder."""
    return ByteTokenizer() if name == "bytes" else PretrainedTokenizer(name)


def tokenise(dataset: datasets.Dataset, config: HubText, tokenizer: Tokenizer) -> datasets.Dataset:
    """The documents' tokens in a column "input_ids"; `datasets` keeps the result in its cache on disk."""
    text_column = column(dataset, config.text_column, "text_column")
    width = "uint16" if tokenizer.vocab_size <= 2**16 else "int32"
    return dataset.map(
        lambda rows: {"input_ids": tokenizer.encode(rows[text_column])},
        batched=True,
        remove_columns=dataset.column_names,
        features=datasets.Features({"input_ids": datasets.List(datasets.Value(width))}),
        num_proc=config.num_workers or None,
        desc="tokenising",
    )


# --- blocks -------------------------------------------------------------------------------------------------------


class ArrayTokens:
    """A stream of tokens in memory."""

    def __init__(self, tokens: NDArray[np.integer]):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start to stop."""
        return self.tokens[start:stop].astype(np.int64)


class ArrowTokens:
    """The token lists of all documents of a tokenised data set as one stream, read from its memory-mapped files.

    Args:
        dataset: A data set with a column "input_ids", in its stored order.
    """

    def __init__(self, dataset: datasets.Dataset):
        chunks = dataset.data.column("input_ids").chunks
        # `flatten` gives the values of all lists of a chunk, without copying them.
        self.chunks: list[pa.Array] = [chunk.flatten() for chunk in chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in self.chunks)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start to stop."""
        pieces = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first = int(self.starts[number])
            piece = self.chunks[number].slice(start - first, stop - start)
            pieces.append(piece.to_numpy(zero_copy_only=False).astype(np.int64))
            start += len(piece)
            number += 1
        return np.concatenate(pieces)


class TokenBlocks:
    """Blocks of a stream of tokens as samples.

    Args:
        tokens: The stream.
        block_size: Tokens that each sample predicts.
        num_samples: Blocks to use, from the start of the stream.
        field: Where `num_samples` stands in the config, for the error.
        first_block: Blocks to leave out at the start of the stream.

    Raises:
        DataError: The stream is too short.
    """

    def __init__(
        self, tokens: ArrayTokens | ArrowTokens, block_size: int, num_samples: int, field: str, first_block: int = 0
    ):
        self.tokens = tokens
        self.block_size = block_size
        self.num_samples = num_samples
        self.first_block = first_block
        self.num_available = max(len(tokens) - 1, 0) // block_size - first_block
        if self.num_available < num_samples:
            raise DataError(
                f"{field}: {num_samples}, but the data's {len(tokens):,} tokens hold {max(self.num_available, 0)} "
                f"blocks of {block_size}; write at most that"
            )

    def __len__(self) -> int:
        return self.num_samples

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        starts = (indices + self.first_block) * self.block_size
        blocks = np.stack([self.tokens.read(int(start), int(start) + self.block_size + 1) for start in starts])
        tokens = torch.from_numpy(blocks)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def pydoc_blocks(config: PydocData) -> tuple[TokenBlocks, TokenBlocks]:
    """The Python reference's topics, sorted by name, as bytes."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = ArrayTokens(np.frombuffer(text, dtype=np.uint8))
    return (
        TokenBlocks(tokens, config.block_size, config.num_train_samples, "data.num_train_samples"),
        TokenBlocks(
            tokens,
            config.block_size,
            config.num_eval_samples,
            "data.num_eval_samples",
            first_block=config.num_train_samples,
        ),
    )
