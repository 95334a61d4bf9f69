"""What a recipe's JSON may say of its model: one typed section an architecture."""

from typing import Annotated, Any, Literal

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


class Gpt2(Model):
    """A GPT-2 style decoder, as in `transformers` (`GPT2LMHeadModel`)."""

    architecture: Literal["gpt2"]
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's number of tokens (256 for bytes)."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Transformer blocks."""
    num_heads: PositiveInt
    """Attention heads; divides `hidden_size`."""
    dropout: BelowOne = 0.0
    """Dropout on embeddings, attention weights and residual branches."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; residual projections get it divided by sqrt(2 x num_layers)."""

    @property
    def uses_dropout(self) -> bool:
        return self.dropout > 0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "Gpt2":
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one of them"
            )
        return self


class Lora(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) through `peft`: they alone are trained, saved and exported."""

    rank: PositiveInt
    """Rank of the update of each weight, r in the paper."""
    alpha: PositiveFloat
    """The update is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on the adapters' inputs."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Names of the layers that get an adapter, such as ["q_proj", "v_proj"]; "all-linear" is all but the output's."""


class AutoCausalLM(Model):
    """Any causal language model of `transformers`: pretrained weights, or random ones.

    The model's own dropout is turned off, whatever its configuration says, so that a sample's loss depends on nothing
    but the sample.
    """

    architecture: Literal["auto"]
    path: str | None = None
    """Hub id or local folder of the pretrained weights; they are trained in the precision of the recipe, whatever they
    are stored in."""
    config: dict[str, Any] | None = None
    """Instead of `path`, the configuration of a model with random weights, such as {"model_type": "llama",
    "hidden_size": 64}."""
    lora: Lora | None = None
    """Adapters to train instead of the weights; null trains all weights."""

    @property
    def uses_dropout(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0

    @model_validator(mode="after")
    def _pretrained_or_random(self) -> "AutoCausalLM":
        if (self.path is None) == (self.config is None):
            raise ValueError("write either path, for pretrained weights, or config, for random ones")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('config needs a model_type, such as "llama"')
        return self
