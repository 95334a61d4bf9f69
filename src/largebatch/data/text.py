"""Text as samples of tokens: the Python reference as bytes, or prepared documents.

As "blocks", all documents form one stream of tokens. Sample i is the block_size + 1 tokens from i * block_size on: the
model reads the first block_size and predicts the last block_size, so each token of the stream is predicted once. As
"documents", each document is one sample.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from largebatch.config.data import HubText, MegatronText, PydocData, TextData, listed
from largebatch.data.megatron import open_megatron
from largebatch.data.order import Indices
from largebatch.data.preparation import Preparation
from largebatch.data.prepared import open_prepared
from largebatch.data.source import Batch, Sources
from largebatch.data.token_stream import TokenStream
from largebatch.data.tokenizer import ByteTokenizer, Tokenizer
from largebatch.errors import DataError


def tokenized_samples(data: HubText | MegatronText, tokenizer: Tokenizer, preparation: Preparation) -> Sources:
    """The training and evaluation documents as samples of this tokenizer's tokens."""
    if isinstance(data, MegatronText):
        train = open_megatron(listed(data.train), "data.train", tokenizer.vocab_size)
        evaluation = open_megatron(listed(data.eval), "data.eval", tokenizer.vocab_size)
        if data.attention == "document" and train.read_document(0, len(train))[-1:] != [tokenizer.end_of_text]:
            raise DataError(
                f"data.attention: the first document of {listed(data.train)[0]} does not end with token "
                f'{tokenizer.end_of_text}; make the files with --append-eod, or write "block"'
            )
    else:
        train, evaluation = open_prepared(data, tokenizer, preparation)
    return _samples(data, train, evaluation, tokenizer.end_of_text if data.attention == "document" else None)


def _samples(data: TextData, train: TokenStream, evaluation: TokenStream, end_of_text: int | None = None) -> Sources:
    """The documents as samples of the section's kind; for `end_of_text` see `TokenBlocks`."""
    kind = PaddedDocuments if data.samples == "documents" else TokenBlocks
    return (
        kind(train, data.block_size, data.num_train_samples, "data.num_train_samples", end_of_text),
        kind(evaluation, data.block_size, data.num_eval_samples, "data.num_eval_samples", end_of_text),
    )


# --- samples ------------------------------------------------------------------------------------------------------

IGNORE_INDEX = -100  # a label that is not predicted: torch's own default


def count_targets(batch: Batch) -> int:
    """Tokens of a batch that are predicted."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


@dataclass(eq=False)
class _TokenSamples(ABC):
    """Samples whose weight is the number of tokens that they predict.

    Raises:
        DataError: There are too few samples.
    """

    tokens: TokenStream  # the documents
    block_size: int  # tokens that a sample predicts, at most
    num_samples: int  # how many samples to use
    field: str  # the config's field for that number
    end_of_text: int | None = None  # the token that ends documents, if they are to be kept apart in a sample

    def __post_init__(self) -> None:
        if self.num_available < self.num_samples:
            raise DataError(
                f"{self.field}: {self.num_samples}, but the data has {self.num_available} samples; "
                "write at most that many"
            )

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Samples in the data."""

    def __len__(self) -> int:
        return self.num_samples

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)


class TokenBlocks(_TokenSamples):
    """Blocks of a stream of tokens, each predicting `block_size` tokens.

    With `end_of_text`, each document in a block gets its own positions, by which models of `transformers` keep
    documents apart. For arguments and errors see `_TokenSamples`.
    """

    @property
    def num_available(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.block_size

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        starts = (indices * self.block_size).tolist()
        blocks = np.stack([self.tokens.read(start, start + self.block_size + 1) for start in starts])
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

    At most `block_size` tokens of each are predicted, and the rest is cut off. For arguments and errors see
    `_TokenSamples`.
    """

    @property
    def num_available(self) -> int:
        return self.tokens.num_documents

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        documents = [self.tokens.read_document(number, self.block_size + 1) for number in indices.tolist()]
        # A document of one token has nothing to predict.
        longest = max(1, *(len(document) - 1 for document in documents))
        input_ids = torch.zeros((len(documents), longest), dtype=torch.int64)
        labels = torch.full((len(documents), longest), IGNORE_INDEX, dtype=torch.int64)
        for number, document in enumerate(documents):
            tokens = torch.from_numpy(document)
            # A file of Megatron's may have documents without any token.
            count = max(0, len(tokens) - 1)
            input_ids[number, :count] = tokens[:-1]
            labels[number, :count] = tokens[1:]
        return {"input_ids": input_ids, "labels": labels}


# --- the Python reference -----------------------------------------------------------------------------------------


def pydoc_samples(config: PydocData) -> Sources:
    """The Python reference's topics, sorted by name, as bytes; as documents, the paragraphs of the topics."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    text = "\n".join(topics[name] for name in sorted(topics))
    if config.samples == "documents":
        train = ByteTokenizer().encode([paragraph for paragraph in text.split("\n\n") if paragraph.strip()])
        evaluation = train[config.num_train_samples :]
    else:
        train = [list(text.encode())]
        evaluation = [train[0][config.num_train_samples * config.block_size :]]
    return _samples(config, TokenStream.in_memory(train), TokenStream.in_memory(evaluation))
