"""Text as samples of tokens: the Python reference as bytes, or documents through `datasets`.

As "blocks", all documents form one stream of tokens. Sample i is the block_size + 1 tokens from i * block_size on: the
model reads the first block_size and predicts the last block_size, so each token of the stream is predicted once. As
"documents", each document is one sample.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from largebatch.config.data import HubText, PydocData, TextData
from largebatch.data.hub import column, open_splits
from largebatch.data.order import Indices
from largebatch.data.source import Batch, SampleSource, longest_of
from largebatch.data.tokenizer import ByteTokenizer, Tokenizer
from largebatch.errors import DataError

if TYPE_CHECKING:
    import datasets


def hub_samples(data: HubText, tokenizer: Tokenizer) -> tuple[SampleSource, SampleSource]:
    """The training and evaluation documents that `datasets` finds, as samples of this tokenizer's tokens."""
    train, evaluation = (tokenize(split, data, tokenizer) for split in open_splits(data))
    if data.samples == "documents":
        return _both(PaddedDocuments, data, train.with_format("numpy"), evaluation.with_format("numpy"))
    end_of_text = tokenizer.end_of_text if data.attention == "document" else None
    kind = partial(TokenBlocks, end_of_text=end_of_text)
    return _both(kind, data, stored_stream(train), stored_stream(evaluation))


def _both(
    kind: Callable[..., SampleSource], data: TextData, train: Any, evaluation: Any, first_of_eval: int = 0
) -> tuple[SampleSource, SampleSource]:
    return (
        kind(train, data.block_size, data.num_train_samples, "data.num_train_samples"),
        kind(evaluation, data.block_size, data.num_eval_samples, "data.num_eval_samples", first_of_eval),
    )


def tokenize(dataset: "datasets.Dataset", config: HubText, tokenizer: Tokenizer) -> "datasets.Dataset":
    """The documents' tokens in a column "input_ids"; `datasets` keeps the result in its cache on disk."""
    import datasets

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


# --- samples ------------------------------------------------------------------------------------------------------

IGNORE_INDEX = -100  # a label that is not predicted: torch's own default


def count_targets(batch: Batch) -> int:
    """Tokens of a batch that are predicted."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


class _TokenSamples:
    """Samples whose weight is the number of tokens that they predict.

    Args:
        available: Samples in the data, including the skipped ones.
        content: For the error: the data's content, with braces for the number of its samples.
        num_samples: Number of samples to use.
        field: The config's field for `num_samples`.
        first: Number of samples to skip at the start.

    Raises:
        DataError: There are too few samples.
    """

    def __init__(self, available: int, content: str, num_samples: int, field: str, first: int):
        self.num_samples = num_samples
        self.first = first
        self.num_available = available - first
        if self.num_available < num_samples:
            found = content.format(max(self.num_available, 0))
            besides = f" besides the {first} of data.num_train_samples" if first else ""
            raise DataError(f"{field}: {num_samples}, but {found}{besides}; write at most that many")

    def __len__(self) -> int:
        return self.num_samples

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)


class TokenStream:
    """A stream of tokens in chunks, which may be memory-mapped."""

    def __init__(self, chunks: Sequence[NDArray[np.integer]]):
        self.chunks = chunks
        self.starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`."""
        pieces = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first = int(self.starts[number])
            pieces.append(self.chunks[number][start - first : stop - first])
            start += len(pieces[-1])
            number += 1
        return np.concatenate(pieces, dtype=np.int64)


def stored_stream(dataset: "datasets.Dataset") -> TokenStream:
    """The tokens of all documents of a tokenized data set, in its stored order, from its memory-mapped files."""
    # The values of all lists of a chunk, without copying them; slicing Arrow's own arrays takes longer.
    return TokenStream([chunk.flatten().to_numpy() for chunk in dataset.data.column("input_ids").chunks])


class TokenBlocks(_TokenSamples):
    """Blocks of a stream of tokens, each predicting `block_size` tokens.

    With `end_of_text`, the token that ends documents, each document in a block gets its own positions, by which models
    of `transformers` keep documents apart. For the other arguments and errors see `_TokenSamples`.
    """

    def __init__(
        self,
        tokens: TokenStream,
        block_size: int,
        num_samples: int,
        field: str,
        first: int = 0,
        end_of_text: int | None = None,
    ):
        content = f"the data's {len(tokens):,} tokens hold {{}} blocks of {block_size}"
        super().__init__(max(len(tokens) - 1, 0) // block_size, content, num_samples, field, first)
        self.tokens = tokens
        self.block_size = block_size
        self.end_of_text = end_of_text

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        starts = (indices + self.first) * self.block_size
        blocks = np.stack([self.tokens.read(int(start), int(start) + self.block_size + 1) for start in starts])
        tokens = torch.from_numpy(blocks)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if self.end_of_text is not None:
            batch["position_ids"] = _positions_in_documents(batch["input_ids"] == self.end_of_text)
        return batch


def _positions_in_documents(is_last: torch.Tensor) -> torch.Tensor:
    """Each token's position in its document or, if that began before the block, in the block: (batch, tokens)."""
    places = torch.arange(is_last.shape[1]).expand(is_last.shape)
    is_first = is_last.roll(1, dims=1)
    return places - torch.where(is_first, places, 0).cummax(dim=1).values


class PaddedDocuments(_TokenSamples):
    """Documents as samples, each predicted from its second token to its end-of-text token.

    `documents` are rows with "input_ids"; at most `block_size` tokens of each are predicted, and the rest is cut off.
    For the other arguments and errors see `_TokenSamples`.
    """

    def __init__(self, documents: Sequence[Any], block_size: int, num_samples: int, field: str, first: int = 0):
        super().__init__(len(documents), "the data has {} documents", num_samples, field, first)
        self.documents = documents
        self.block_size = block_size

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        rows = [self.documents[int(index) + self.first] for index in indices]
        documents = [np.asarray(row["input_ids"][: self.block_size + 1], dtype=np.int64) for row in rows]
        # A document of one token has nothing to predict.
        longest = max(1, *(len(document) - 1 for document in documents))
        input_ids = torch.zeros((len(documents), longest), dtype=torch.int64)
        labels = torch.full((len(documents), longest), IGNORE_INDEX, dtype=torch.int64)
        for number, document in enumerate(documents):
            tokens = torch.from_numpy(document)
            input_ids[number, : len(tokens) - 1] = tokens[:-1]
            labels[number, : len(tokens) - 1] = tokens[1:]
        return {"input_ids": input_ids, "labels": labels}

    def longest(self, count: int) -> Indices:
        """The indices of so many of the longest documents."""
        if isinstance(self.documents, list):
            lengths = np.array([len(row["input_ids"]) for row in self.documents])
        else:
            chunks = self.documents.data.column("input_ids").chunks  # type: ignore[attr-defined]
            lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in chunks])
        return longest_of(lengths[self.first : self.first + self.num_samples], count)


# --- the Python reference -----------------------------------------------------------------------------------------


def pydoc_samples(config: PydocData) -> tuple[SampleSource, SampleSource]:
    """The Python reference's topics, sorted by name, as bytes; as documents, the paragraphs of the topics."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    text = "\n".join(topics[name] for name in sorted(topics))
    if config.samples == "documents":
        paragraphs = ByteTokenizer().encode([paragraph for paragraph in text.split("\n\n") if paragraph.strip()])
        rows = [{"input_ids": tokens} for tokens in paragraphs]
        return _both(PaddedDocuments, config, rows, rows, first_of_eval=config.num_train_samples)
    tokens = TokenStream([np.frombuffer(text.encode(), dtype=np.uint8)])
    return _both(TokenBlocks, config, tokens, tokens, first_of_eval=config.num_train_samples)
