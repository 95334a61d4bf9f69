"""Text as samples of tokens: the Python reference as bytes, or documents through `datasets`.

As "blocks", all documents form one stream of tokens. Sample i is the block_size + 1 tokens from i * block_size on: the
model reads the first block_size and predicts the last block_size, so each token of the stream is predicted once. As
"documents", each document is a sample of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray

from largebatch.config.data import HubText, PydocData, TextData
from largebatch.data.hub import column, open_splits
from largebatch.data.order import Indices
from largebatch.data.source import Batch, SampleSource
from largebatch.data.tokenizer import ByteTokenizer, Tokenizer
from largebatch.errors import DataError


def hub_samples(data: HubText, tokenizer: Tokenizer) -> tuple[SampleSource, SampleSource]:
    """The documents that `datasets` finds, as samples of this tokenizer's tokens."""
    train, evaluation = (tokenize(split, data, tokenizer) for split in open_splits(data))
    if data.samples == "documents":
        return _both(PaddedDocuments, data, ArrowDocuments(train), ArrowDocuments(evaluation))
    end_of_text = tokenizer.end_of_text if data.attention == "document" else None
    kind = partial(TokenBlocks, end_of_text=end_of_text)
    return _both(kind, data, ArrowTokens(train), ArrowTokens(evaluation))


def _both(
    kind: Callable[..., SampleSource], data: TextData, train: Any, evaluation: Any, first_of_eval: int = 0
) -> tuple[SampleSource, SampleSource]:
    return (
        kind(train, data.block_size, data.num_train_samples, "data.num_train_samples"),
        kind(evaluation, data.block_size, data.num_eval_samples, "data.num_eval_samples", first_of_eval),
    )


# --- tokenizing ---------------------------------------------------------------------------------------------------


def tokenize(dataset: datasets.Dataset, config: HubText, tokenizer: Tokenizer) -> datasets.Dataset:
    """The documents' tokens in a column "input_ids"; `datasets` keeps the result in its cache on disk."""
    text_column = column(dataset, config.text_column, "text_column")
    width = "uint16" if tokenizer.vocab_size <= 2**16 else "int32"
    return dataset.map(
        lambda rows: {"input_ids": tokenizer.encode(rows[text_column])},
        batched=True,
        remove_columns=dataset.column_names,
        features=datasets.Features({"input_ids": datasets.List(datasets.Value(width))}),
        num_proc=config.num_workers or None,
        desc="tokenizing",
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
    """The token lists of all documents of a tokenized data set as one stream, read from its memory-mapped files.

    Args:
        dataset: A data set with a column "input_ids", in its stored order.
    """

    def __init__(self, dataset: datasets.Dataset):
        chunks = dataset.data.column("input_ids").chunks
        # The values of all lists of a chunk, without copying them; a slice of Arrow's own arrays takes longer.
        self.chunks: list[NDArray[np.integer]] = [chunk.flatten().to_numpy() for chunk in chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in self.chunks)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start to stop."""
        pieces = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first = int(self.starts[number])
            pieces.append(self.chunks[number][start - first : stop - first])
            start += len(pieces[-1])
            number += 1
        return np.concatenate(pieces).astype(np.int64)


IGNORE_INDEX = -100  # a label that is not predicted: torch's own default


def count_targets(batch: Batch) -> int:
    """Tokens of a batch that are predicted."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def _besides(first: int) -> str:
    return f" besides the {first} of data.num_train_samples" if first else ""


class TokenBlocks:
    """Blocks of a stream of tokens as samples.

    Args:
        tokens: The stream.
        block_size: Tokens that each sample predicts.
        num_samples: Blocks to use.
        field: Where `num_samples` stands in the config, for the error.
        first: Blocks to leave out at the start of the stream.
        end_of_text: The token that ends documents, where those of a block are to have positions of their own, by which
            models of `transformers` keep them apart.

    Raises:
        DataError: The stream is too short.
    """

    def __init__(
        self,
        tokens: ArrayTokens | ArrowTokens,
        block_size: int,
        num_samples: int,
        field: str,
        first: int = 0,
        end_of_text: int | None = None,
    ):
        self.tokens = tokens
        self.block_size = block_size
        self.num_samples = num_samples
        self.first = first
        self.end_of_text = end_of_text
        self.num_available = max(len(tokens) - 1, 0) // block_size - first
        if self.num_available < num_samples:
            raise DataError(
                f"{field}: {num_samples}, but the data's {len(tokens):,} tokens hold {max(self.num_available, 0)} "
                f"blocks of {block_size}{_besides(first)}; write at most that"
            )

    def __len__(self) -> int:
        return self.num_samples

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        starts = (indices + self.first) * self.block_size
        blocks = np.stack([self.tokens.read(int(start), int(start) + self.block_size + 1) for start in starts])
        tokens = torch.from_numpy(blocks)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if self.end_of_text is not None:
            batch["position_ids"] = _positions_in_documents(batch["input_ids"] == self.end_of_text)
        return batch

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)


def _positions_in_documents(is_last: torch.Tensor) -> torch.Tensor:
    """The place of each token in its document, as far as it is in the block; int64, shape (batch, tokens) as given.

    Args:
        is_last: Whether a token is the last of its document.
    """
    places = torch.arange(is_last.shape[1]).expand(is_last.shape)
    is_first = is_last.roll(1, dims=1)
    return places - torch.where(is_first, places, 0).cummax(dim=1).values


# --- documents ----------------------------------------------------------------------------------------------------


class ArrowDocuments:
    """The token lists of a tokenized data set, one by one.

    Args:
        dataset: A data set with a column "input_ids".
    """

    def __init__(self, dataset: datasets.Dataset):
        self.dataset = dataset.with_format("numpy")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        tokens: NDArray[np.integer] = self.dataset[index]["input_ids"]
        return tokens


class PaddedDocuments:
    """Documents as samples, each predicted from its second token to its end-of-text token.

    Args:
        documents: The tokens of each document.
        block_size: Tokens that a sample predicts at most; what a document has beyond is cut off.
        num_samples: Documents to use.
        field: Where `num_samples` stands in the config, for the error.
        first: Documents to leave out at the start.

    Raises:
        DataError: There are too few documents.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]] | ArrowDocuments,
        block_size: int,
        num_samples: int,
        field: str,
        first: int = 0,
    ):
        self.documents = documents
        self.block_size = block_size
        self.num_samples = num_samples
        self.first = first
        self.num_available = len(documents) - first
        if self.num_available < num_samples:
            raise DataError(
                f"{field}: {num_samples}, but the data has {max(self.num_available, 0)} documents{_besides(first)}; "
                "write at most that"
            )

    def __len__(self) -> int:
        return self.num_samples

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        documents = [self.documents[int(index) + self.first][: self.block_size + 1] for index in indices]
        # A document of one token has nothing to predict.
        longest = max(1, *(len(document) - 1 for document in documents))
        input_ids = torch.zeros((len(documents), longest), dtype=torch.int64)
        labels = torch.full((len(documents), longest), IGNORE_INDEX, dtype=torch.int64)
        for row, document in enumerate(documents):
            tokens = torch.from_numpy(np.asarray(document, dtype=np.int64))
            input_ids[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = tokens[1:]
        return {"input_ids": input_ids, "labels": labels}

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)


# --- the Python reference -----------------------------------------------------------------------------------------


def pydoc_samples(config: PydocData) -> tuple[SampleSource, SampleSource]:
    """The Python reference's topics, sorted by name, as bytes; as documents, their paragraphs."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    text = "\n".join(topics[name] for name in sorted(topics))
    if config.samples == "documents":
        paragraphs = ByteTokenizer().encode([paragraph for paragraph in text.split("\n\n") if paragraph.strip()])
        return _both(PaddedDocuments, config, paragraphs, paragraphs, first_of_eval=config.num_train_samples)
    tokens = ArrayTokens(np.frombuffer(text.encode(), dtype=np.uint8))
    return _both(TokenBlocks, config, tokens, tokens, first_of_eval=config.num_train_samples)
