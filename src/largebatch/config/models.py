"""The model sections that tasks share: what the plan needs to know about any model, transformers, ResNets."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from largebatch.config.sections import BelowOne, NumLayers, Section, Size
from largebatch.system.repositories import RepositoryKind


class Model(Section):
    """The base of every model section: what the plan needs to know about the model."""

    @property
    def uses_batch_norm(self) -> bool:
        """Whether the loss of a sample depends on the other samples of its micro-batch."""
        return False

    @property
    def synchronizes_batch_norm(self) -> bool:
        """Whether it also depends on the samples of the other processes' micro-batches."""
        return False

    @property
    def uses_dropout(self) -> bool:
        """Whether the model draws random numbers, which depend on how the global batch is cut into micro-batches."""
        return False

    @property
    def stores_frozen_in_bf16(self) -> bool:
        """Whether weights that are not trained are stored in bf16, beside those in fp32 that are."""
        return False

    @property
    def read_in_parts_from(self) -> str | None:
        """Local folder or hub id of the `transformers` model that `build_model` loads; None if it loads none.

        A process then need not hold the whole of it: see `Run.build`.
        """
        return None


class ResNet(Model):
    """A residual network, as in `transformers`."""

    architecture: Literal["resnet"]
    embedding_size: Size
    """Channels after the first convolution."""
    hidden_sizes: Annotated[list[Size], Field(min_length=1, max_length=64)]
    """Channels of each stage."""
    depths: Annotated[list[NumLayers], Field(min_length=1, max_length=64)]
    """Residual blocks of each stage."""
    layer_type: Literal["basic", "bottleneck"]
    """Convolutions of a block: "basic" has two of 3 x 3, "bottleneck" has 1 x 1, 3 x 3 and 1 x 1."""
    sync_batch_norm: bool = False
    """Whether BatchNorm normalizes over the micro-batches of all processes together; `micro_batch_size` x processes is
    then part of the loss function."""

    @property
    def settings(self) -> dict[str, Any]:
        """These fields as a `ResNetConfig` of `transformers` has them."""
        return self.model_dump(include={"embedding_size", "hidden_sizes", "depths", "layer_type"})

    @property
    def uses_batch_norm(self) -> bool:
        return True

    @property
    def synchronizes_batch_norm(self) -> bool:
        return self.sync_batch_norm

    @model_validator(mode="after")
    def _same_number_of_stages(self) -> Self:
        if len(self.hidden_sizes) != len(self.depths):
            raise ValueError(
                f"hidden_sizes has {len(self.hidden_sizes)} stages and depths has {len(self.depths)}; "
                "give one number per stage in both"
            )
        return self


class Transformer(Model):
    """The fields that every transformer has."""

    hidden_size: Size
    """Width of the residual stream."""
    num_layers: NumLayers
    """Transformer blocks."""
    num_heads: Size
    """Attention heads; `hidden_size` must be a multiple of it."""

    @property
    def settings(self) -> dict[str, Any]:
        """These fields as most configurations of `transformers` have them, with feed-forward layers four times as wide
        as the residual stream."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
        }

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one of them"
            )
        return self


class TransformerWithDropout(Transformer):
    """A transformer that may have dropout."""

    dropout: BelowOne = 0.0
    """Dropout on embeddings, attention weights and residual branches."""

    @property
    def settings(self) -> dict[str, Any]:
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)
        return super().settings | dropout

    @property
    def uses_dropout(self) -> bool:
        return self.dropout > 0


class LargeModel(Model):
    """A model that is built without weights; each process then sets the ranges that it holds, so that FSDP2 and ZeRO-3
    need not hold it whole. Random weights are a function of the run's seed and each parameter's name."""

    initial_weights: str | None = None
    """Starting weights: a local folder, or ID or ID@REVISION on the hub, of `safetensors` files for exactly this model;
    null draws them."""

    @property
    def hub_fields(self) -> dict[str, RepositoryKind]:
        return {} if self.initial_weights is None else {"initial_weights": "model"}
