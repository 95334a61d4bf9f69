"""What a recipe's JSON may say of its model: one typed section an architecture."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.config.sections import BelowOne, PositiveFloat, PositiveInt, Section


class Model(Section):
    """What the plan needs to know of any model."""

    @property
    def uses_batch_norm(self) -> bool:
        """Whether the loss of a sample depends on the others of its micro-batch."""
        return False

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether it depends on those of the other processes' micro-batches, too."""
        return False

    @property
    def uses_dropout(self) -> bool:
        """Whether the model draws random numbers, which depend on how the global batch is cut into micro-batches."""
        return False


class ResNet(Model):
    """A residual network, as in `transformers` (`ResNetForImageClassification`)."""

    architecture: Literal["resnet"]
    embedding_size: PositiveInt
    """Channels after the first convolution."""
    hidden_sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    """Channels of each stage."""
    depths: Annotated[list[PositiveInt], Field(min_length=1)]
    """Residual blocks of each stage."""
    layer_type: Literal["basic", "bottleneck"]
    """Two 3 x 3 convolutions a block, or 1 x 1, 3 x 3, 1 x 1."""
    stem: Literal["large_images", "small_images"] = "large_images"
    """"large_images": a 7 x 7 convolution and max-pooling, each halving the image, as for ImageNet; "small_images": a
    3 x 3 convolution that leaves its size, as for CIFAR's 32 pixels."""
    sync_batch_norm: bool = False
    """Whether BatchNorm normalises over the micro-batches of all processes together; `micro_batch_size` x processes is
    then part of the loss function."""

    @property
    def uses_batch_norm(self) -> bool:
        return True

    @property
    def synchronises_batch_norm(self) -> bool:
        return self.sync_batch_norm

    @model_validator(mode="after")
    def _same_number_of_stages(self) -> "ResNet":
        if len(self.hidden_sizes) != len(self.depths):
            raise ValueError(
                f"hidden_sizes has {len(self.hidden_sizes)} stages and depths has {len(self.depths)}; "
                "give one number a stage in both"
            )
        return self


class Transformer(Model):
    """What every transformer has."""

    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Transformer blocks."""
    num_heads: PositiveInt
    """Attention heads; divides `hidden_size`."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one of them"
            )
        return self


class TransformerWithDropout(Transformer):
    """One that may have dropout."""

    dropout: BelowOne = 0.0
    """Dropout on embeddings, attention weights and residual branches."""

    @property
    def uses_dropout(self) -> bool:
        return self.dropout > 0


class Gpt2(TransformerWithDropout):
    """A GPT-2 style decoder, as in `transformers` (`GPT2LMHeadModel`)."""

    architecture: Literal["gpt2"]
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of tokens (256 for bytes)."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; residual projections get it divided by sqrt(2 x num_layers)."""


class Vit(TransformerWithDropout):
    """A Vision Transformer, as in `transformers` (`ViTForImageClassification`): a class token, learned positions, and
    GELU layers four times as wide as the residual stream."""

    architecture: Literal["vit"]
    patch_size: PositiveInt
    """Side in pixels of the squares that become tokens; divides `data.image_size`."""


class LargeModel(Model):
    """A model that no process need hold whole: built without weights, which each process then sets where it has them.

    Random weights are a function of the run's seed and each parameter's name.
    """

    initial_weights: str | None = None
    """Weights to begin with: a local folder or hub id of `safetensors` files for this very model; null draws them."""


class Llama(Transformer, LargeModel):
    """A Llama decoder, as in `transformers` (`LlamaForCausalLM`)."""

    architecture: Literal["llama"]
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of tokens (256 for bytes)."""
    intermediate_size: PositiveInt
    """Width of the feed-forward layers."""
    num_kv_heads: PositiveInt
    """Heads of keys and values, each shared by as many attention heads; divides `num_heads`."""
    rope_theta: PositiveFloat = 500000.0
    """Base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool
    """Whether the output layer has the embedding's weights."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_fit_rotary_positions(self) -> "Llama":
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
