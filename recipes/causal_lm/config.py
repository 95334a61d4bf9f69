"""The config of this folder's recipes: text from Hugging Face `datasets` or Python's reference, a GPT-2 or a Llama."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from largebatch.config import RecipeConfig, check
from largebatch.config.data import HubText, MegatronText, PydocData
from largebatch.config.models import LargeModel, Transformer, TransformerWithDropout
from largebatch.config.sections import PositiveFloat, Size


class Gpt2(TransformerWithDropout):
    """A GPT-2 style decoder, as in `transformers` (`GPT2LMHeadModel`)."""

    architecture: Literal["gpt2"]
    vocab_size: Size
    """Rows of the embedding; at least the tokenizer's number of tokens (256 for bytes)."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; for residual projections it is divided by sqrt(2 x num_layers)."""


class Llama(Transformer, LargeModel):
    """A Llama decoder, as in `transformers` (`LlamaForCausalLM`)."""

    architecture: Literal["llama"]
    vocab_size: Size
    """Rows of the embedding; at least the tokenizer's number of tokens (256 for bytes)."""
    intermediate_size: Size
    """Width of the feed-forward layers."""
    num_kv_heads: Size
    """Heads of keys and values, each shared by the same number of attention heads; divides `num_heads`."""
    rope_theta: PositiveFloat = 500000.0
    """Base of the rotary frequencies."""
    rope_scaling_factor: PositiveFloat | None = None
    """Divides the rotary frequencies whose wavelength is long compared with 8,192 tokens, as Llama 3.1 does by 8; null:
    none is."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool
    """Whether the output layer shares the embedding's weights."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    scaled_residual_init: bool = False
    """Whether that of residual projections is divided by sqrt(2 x num_layers), as in Megatron-LM."""

    @model_validator(mode="after")
    def _heads_fit_rotary_positions(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of 2 x num_heads {self.num_heads}: rotary positions "
                "turn pairs of a head's channels; change one of them"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; change one of them"
            )
        return self


class Config(RecipeConfig):
    """Pre-training of a causal language model."""

    data: Annotated[PydocData | HubText | MegatronText, Field(discriminator="source")]
    model: Annotated[Gpt2 | Llama, Field(discriminator="architecture")]

    def tiny_data(self) -> dict[str, Any] | None:
        if isinstance(self.data, PydocData):
            return None
        data = {"source": "pydoc", "block_size": 32, "num_train_samples": 256, "num_eval_samples": 16}
        # Logits of a real vocabulary would take nearly all the time on a CPU, and the text consists of bytes.
        return {"data": data, "model.vocab_size": 512}

    @check
    def _norms_in_fp64(self) -> Iterator[str]:
        if self.precision == "fp64" and isinstance(self.model, Llama):
            yield (
                'precision: "fp64" would not be fp64 throughout: Llama\'s RMSNorm in `transformers` computes in fp32 '
                'whatever its input; write "fp32", or model.architecture "gpt2"'
            )
