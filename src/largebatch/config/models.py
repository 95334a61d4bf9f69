"""What the model sections of recipes share: what the plan needs to know of any model, transformers, ResNets."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.config.sections import BelowOne, PositiveInt, Section


class Model(Section):
    """What the plan needs to know of any model."""

    @property
    def uses_batch_norm(self) -> bool:
        """Whether the loss of a sample depends on the others of its micro-batch."""
        return False

    @property
    def synchronizes_batch_norm(self) -> bool:
        """Whether it depends on those of the other processes' micro-batches, too."""
        return False

    @property
    def uses_dropout(self) -> bool:
        """Whether the model draws random numbers, which depend on how the global batch is cut into micro-batches."""
        return False


class ResNet(Model):
    """A residual network, as in `transformers`."""

    architecture: Literal["resnet"]
    embedding_size: PositiveInt
    """Channels after the first convolution."""
    hidden_sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    """Channels of each stage."""
    depths: Annotated[list[PositiveInt], Field(min_length=1)]
    """Residual blocks of each stage."""
    layer_type: Literal["basic", "bottleneck"]
    """Two 3 x 3 convolutions a block, or 1 x 1, 3 x 3, 1 x 1."""
    sync_batch_norm: bool = False
    """Whether BatchNorm normalizes over the micro-batches of all processes together; `micro_batch_size` x processes is
    then part of the loss function."""

    @property
    def uses_batch_norm(self) -> bool:
        return True

    @property
    def synchronizes_batch_norm(self) -> bool:
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


class LargeModel(Model):
    """A model that no process need hold whole: built without weights, which each process then sets where it has them.

    Random weights are a function of the run's seed and each parameter's name.
    """

    initial_weights: str | None = None
    """Weights to begin with: a local folder or hub id of `safetensors` files for this very model; null draws them."""
