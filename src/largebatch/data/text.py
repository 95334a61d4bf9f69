"""Text as samples of tokens: the Python reference as bytes, or prepared documents.

All documents form one stream of tokens. Sample i is the block_size + 1 tokens from i * block_size on: the model reads
the first block_size and predicts the last block_size, so each token of the stream is predicted once.
"""

from dataclasses import dataclass

import numpy as np
import torch

from largebatch.config.data import HubText, MegatronText, PydocData, listed
from largebatch.data.megatron import open_megatron
from largebatch.data.order import Indices
from largebatch.data.preparation import Preparation
from largebatch.data.prepared import open_prepared
from largebatch.data.source import Batch
from largebatch.data.token_stream import TokenStream
from largebatch.data.tokenizer import Tokenizer


def tokenized_samples(
    data: PydocData | HubText | MegatronText, tokenizer: Tokenizer, preparation: Preparation
) -> tuple["TokenBlocks", "TokenBlocks"]:
    """The training and evaluation documents as samples of this tokenizer's tokens."""
    keeps_apart = not isinstance(data, PydocData) and data.attention == "document"
    end_of_text = tokenizer.end_of_text if keeps_apart else None
    if isinstance(data, PydocData):
        train, evaluation = pydoc_tokens(data)
    elif isinstance(data, MegatronText):
        train = open_megatron(listed(data.train), "data.train", tokenizer.vocab_size, end_of_text)
        evaluation = open_megatron(listed(data.eval), "data.eval", tokenizer.vocab_size, end_of_text)
    else:
        train, evaluation = open_prepared(data, tokenizer, preparation)
    return (
        TokenBlocks(train, data.block_size, data.num_train_samples, end_of_text),
        TokenBlocks(evaluation, data.block_size, data.num_eval_samples, end_of_text),
    )


# --- samples ------------------------------------------------------------------------------------------------------

IGNORE_INDEX = -100  # a label that is not predicted: torch's own default


def count_targets(batch: Batch) -> int:
    """Tokens of a batch that are predicted."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


@dataclass(eq=False)
class TokenBlocks:
    """Blocks of a stream of tokens, each predicting `block_size` tokens.

    With `end_of_text`, each document in a block gets its own positions, by which models of `transformers` keep
    documents apart.
    """

    tokens: TokenStream  # the documents
    block_size: int  # tokens that a sample predicts
    num_samples: int  # how many samples to use, if there are as many
    end_of_text: int | None = None  # the token that ends documents, if they are to be kept apart in a sample
    has_checksums = True

    @property
    def num_available(self) -> int:
        """Samples in the data."""
        return max(len(self.tokens) - 1, 0) // self.block_size

    @property
    def remark(self) -> str | None:
        """What is unusual about the tokens."""
        return self.tokens.remark

    def __len__(self) -> int:
        return min(self.num_samples, self.num_available)

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:  # noqa: ARG002 - there is no augmentation
        starts = (indices * self.block_size).tolist()
        blocks = np.stack([self.tokens.read(start, start + self.block_size + 1) for start in starts])
        tokens = torch.from_numpy(blocks)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if self.end_of_text is not None:
            batch["position_ids"] = _positions_in_documents(batch["input_ids"] == self.end_of_text)
        return batch

    def weight(self, batch: Batch) -> int:
        return count_targets(batch)


def _positions_in_documents(is_last: torch.Tensor) -> torch.Tensor:
    """Each token's position in its document or, if that began before the block, in the block: (batch, tokens)."""
    places = torch.arange(is_last.shape[1]).expand(is_last.shape)
    is_first = is_last.roll(1, dims=1)
    return places - torch.where(is_first, places, 0).cummax(dim=1).values


# --- the Python reference -----------------------------------------------------------------------------------------


def pydoc_tokens(config: PydocData) -> tuple[TokenStream, TokenStream]:
    """The bytes of the Python reference's topics, sorted by name: all, and those after the training samples."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = np.frombuffer(text.encode(), np.uint8)
    held_out = tokens[config.num_train_samples * config.block_size :]
    return TokenStream.in_memory(tokens), TokenStream.in_memory(held_out)
