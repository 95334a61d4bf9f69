"""The config of this folder's recipes: text with some tokens hidden, and a BERT."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from largebatch.config import RecipeConfig, check
from largebatch.config.data import Data, HubText, MegatronText, PydocData, TextData
from largebatch.config.models import LargeModel, TransformerWithDropout
from largebatch.config.sections import PositiveFloat, PositiveFraction, Size


class MaskedText(TextData):
    """Text in blocks, in which some tokens are hidden from the model and predicted."""

    mask_fraction: PositiveFraction = 0.15
    """Fraction of a block's tokens that are predicted, rounded to a whole number, the same in every block. Durations in
    tokens, the loss and `tokens_per_second` count only these."""

    @property
    def tokens_per_sample(self) -> int:
        return round(self.mask_fraction * self.block_size)

    @model_validator(mode="after")
    def _something_to_predict(self) -> Self:
        if self.tokens_per_sample == 0:
            raise ValueError(
                f"mask_fraction {self.mask_fraction:g} of block_size {self.block_size} is less than half a token, so "
                "there is nothing to predict; increase one of them"
            )
        return self


class MaskedPydoc(MaskedText, PydocData):
    """The Python reference as bytes, masked with the additional token 256."""


class MaskedMegatronText(MaskedText, MegatronText):
    """Documents that Megatron-LM has tokenized, joined and masked."""

    attention: Literal["block"] = "block"


class MaskedHubText(MaskedText, HubText):
    """Text documents through Hugging Face `datasets`, tokenized, joined and masked."""

    attention: Literal["block"] = "block"
    other_kinds: ClassVar[Mapping[str, type[Data]]] = {"megatron": MaskedMegatronText}


class Bert(TransformerWithDropout, LargeModel):
    """A BERT encoder, as in `transformers` (`BertForMaskedLM`), with feed-forward layers four times as wide as the
    residual stream; its output layer shares the embedding's weights."""

    architecture: Literal["bert"]
    vocab_size: Size
    """Rows of the embedding; at least the tokenizer's number of tokens (257 for bytes and their mask)."""
    max_positions: Size
    """Learned positions; at least `data.block_size`, including that of a later phase with longer blocks."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""


class Config(RecipeConfig):
    """Pre-training of a masked language model."""

    data: Annotated[MaskedPydoc | MaskedHubText | MaskedMegatronText, Field(discriminator="source")]
    model: Bert

    def tiny_data(self) -> dict[str, Any] | None:
        if isinstance(self.data, PydocData):
            return None
        data = {"source": "pydoc", "block_size": 32, "num_train_samples": 256, "num_eval_samples": 16}
        # Logits of a real vocabulary would take nearly all the time on a CPU, and the text consists of bytes.
        return {"data": data, "model.vocab_size": 512}

    @check
    def _blocks_within_the_positions(self) -> Iterator[str]:
        if self.data.block_size > self.model.max_positions:
            yield (
                f"data.block_size: {self.data.block_size} is more than the {self.model.max_positions} positions of "
                "model.max_positions; shorten the blocks, or write more positions"
            )
