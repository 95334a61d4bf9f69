"""What a recipe's JSON may say of masked language modelling: text some tokens of which are hidden, and BERT."""

from typing import Literal

from pydantic import model_validator

from largebatch.config.data import HubText, PydocData, TextData
from largebatch.config.models import LargeModel, TransformerWithDropout
from largebatch.config.sections import PositiveFloat, PositiveFraction, PositiveInt


def num_masked(block_size: int, mask_fraction: float) -> int:
    """How many tokens of each block are predicted by masked language modelling; the same number in every one."""
    return round(mask_fraction * block_size)


class MaskedText(TextData):
    """Text whose samples are blocks, some tokens of which are hidden from the model and predicted."""

    samples: Literal["blocks"] = "blocks"
    mask_fraction: PositiveFraction = 0.15
    """Fraction of a block's tokens that are predicted, rounded to a whole number: the same of every block. Durations in
    tokens, like the loss and `tokens_per_second`, count these alone."""

    @property
    def tokens_per_sample(self) -> int:
        return num_masked(self.block_size, self.mask_fraction)

    @model_validator(mode="after")
    def _something_to_predict(self) -> "MaskedText":
        if self.tokens_per_sample == 0:
            raise ValueError(
                f"mask_fraction {self.mask_fraction:g} of block_size {self.block_size} is less than half a token, so "
                "there is nothing to predict; write larger ones"
            )
        return self


class MaskedPydoc(MaskedText, PydocData):
    """The Python reference as bytes, to be masked; the mask is a token of its own, 256."""


class MaskedHubText(MaskedText, HubText):
    """Text documents through Hugging Face `datasets`, tokenised, joined and masked."""

    attention: Literal["block"] = "block"


class Bert(TransformerWithDropout, LargeModel):
    """A BERT encoder, as in `transformers` (`BertForMaskedLM`), with feed-forward layers four times as wide as the
    residual stream; its output layer has the embedding's weights."""

    architecture: Literal["bert"]
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of tokens (257 for bytes and their mask)."""
    max_positions: PositiveInt
    """Learned positions; at least `data.block_size`, and those of a later phase with longer blocks."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
