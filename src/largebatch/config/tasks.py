"""One config class a task: the shared sections plus that task's `data` and `model`."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from largebatch.config.sections import (
    Batch,
    BelowOne,
    Checkpoint,
    Evaluation,
    Faults,
    LearningRate,
    Logging,
    NonNegativeInt,
    Optimizer,
    PositiveFloat,
    PositiveInt,
    Section,
    Train,
    Verify,
)

# --- data ---------------------------------------------------------------------------------------------------------

Rgb = tuple[float, float, float]


class DataFiles(Section):
    """Local files, for data that is not laid out as a data-set repository: of the splits "train" and "validation"."""

    train: str
    """Path or glob of the training files."""
    eval: str
    """Path or glob of the evaluation files."""


class Data(Section):
    """What the plan and the loader need to know of any data set."""

    num_train_samples: PositiveInt
    """Training samples. Stated here so that plans need no data; checked against the data when a run starts."""
    num_eval_samples: PositiveInt
    """Evaluation samples, checked likewise."""
    num_workers: NonNegativeInt = 0
    """Loader processes per training process, and tokenising ones per machine; 0 does both in the training process."""

    @property
    def loss_unit(self) -> Literal["samples", "tokens"]:
        """What the loss is a mean over."""
        return "samples"

    @property
    def tokens_per_sample(self) -> int | None:
        """Target tokens of each sample; None where samples have none, or unequal numbers."""
        return None


class HubOrLocal(Data):
    """Where Hugging Face `datasets` finds the data: a hub id, a local folder, or local files."""

    source: Literal["datasets"]
    path: str
    """Hub id or local folder; with `data_files`, the format: "parquet", "json", "csv", "text" or "imagefolder"."""
    name: str | None = None
    """Configuration of the data set on the hub, where it has several."""
    data_files: DataFiles | None = None
    """Local files, with their format in `path`."""
    train_split: str = "train"
    """Split to train on, or a part of it, such as "train[1%:]"; with `data_files`, of "train" or "validation"."""
    eval_split: str = "validation"
    """Split to evaluate on, likewise."""


class DigitsData(Data):
    """The 1,797 handwritten digits of 8 x 8 pixels that ship with scikit-learn; every fifth one is for evaluation."""

    source: Literal["digits"]
    image_size: PositiveInt = 32
    """Side in pixels that the 8 x 8 images are enlarged to; a multiple of 8."""
    num_train_samples: Literal[1437] = 1437
    num_eval_samples: Literal[360] = 360
    num_classes: Literal[10] = 10
    num_channels: Literal[1] = 1

    @model_validator(mode="after")
    def _whole_enlargement(self) -> "DigitsData":
        if self.image_size % 8:
            raise ValueError(f"image_size {self.image_size} is not a multiple of 8; write 8, 16, 24 or 32")
        return self


class HubImages(HubOrLocal):
    """Labelled images through Hugging Face `datasets`."""

    image_column: str = "image"
    """Column that holds the encoded images."""
    label_column: str = "label"
    """Column that holds the class indices."""
    num_classes: PositiveInt
    """Number of classes."""
    image_size: PositiveInt
    """Side in pixels of the crops the model sees."""
    train_augmentation: Literal["inception_crop", "none"]
    """"inception_crop": a random crop of 8 to 100 % of the area and aspect ratio 3/4 to 4/3, and a random flip
    (Szegedy et al. 2015, as in Goyal et al. 2017, 5.1); "none": the evaluation's centre crop."""
    mean: Rgb
    """Mean of each colour over the training set, on a 0 to 1 scale."""
    std: Rgb
    """Standard deviation of each colour."""
    num_channels: Literal[3] = 3


class TextData(Data):
    """Text as samples of tokens."""

    samples: Literal["blocks", "documents"] = "blocks"
    """"blocks": documents are joined and cut into blocks of `block_size` tokens, each token being predicted once.
    "documents": each document is a sample, cut off after `block_size` tokens; padding behind shorter ones is not
    predicted, so that samples have unequal numbers of target tokens."""
    block_size: PositiveInt
    """Tokens per sample; for "documents", at most."""

    @property
    def loss_unit(self) -> Literal["samples", "tokens"]:
        return "tokens"

    @property
    def tokens_per_sample(self) -> int | None:
        return self.block_size if self.samples == "blocks" else None


class PydocData(TextData):
    """The Python reference that ships with every Python (`pydoc_data.topics`), as bytes; its documents are paragraphs.

    The text differs between Python versions, so exactly the first num_train_samples + num_eval_samples samples are
    used; the evaluation samples are the last ones.
    """

    source: Literal["pydoc"]


class HubText(HubOrLocal, TextData):
    """Text documents through Hugging Face `datasets`, tokenised, with an end-of-text token after each.

    The first `num_train_samples` samples are used; a run says how many there are.
    """

    text_column: str = "text"
    """Column that holds the documents."""
    tokenizer: str
    """Hub id or local folder of a `transformers` tokenizer, or "bytes"."""


# --- models -------------------------------------------------------------------------------------------------------


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


# --- recipes ------------------------------------------------------------------------------------------------------


class RecipeConfig(Section):
    """What every recipe's JSON has."""

    model_config = ConfigDict(validate_by_name=False)

    task: str
    """Which `recipes/<task>/train.py` runs it."""
    schema_: str | None = Field(default=None, alias="$schema")
    """Path of the JSON Schema, for editors."""
    seed: NonNegativeInt = 0
    """Initial weights, sample order, augmentation and dropout all follow from it."""
    precision: Literal["fp32", "bf16", "fp64"]
    """"fp32"; "bf16": matrix products in bfloat16 under autocast; weights, gradients and their reduction in fp32; or
    "fp64", slow, to see differences that are no rounding errors (not on DeepSpeed ZeRO)."""
    data: Data
    model: Model
    batch: Batch
    learning_rate: LearningRate
    optimizer: Optimizer
    train: Train
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    logging: Logging = Logging()
    verify: Verify | None = None
    """How `largebatch verify` makes the model small enough to rehearse; null leaves it as it is."""


class ImageClassificationConfig(RecipeConfig):
    """A recipe for `recipes/image_classification/train.py`."""

    task: Literal["image_classification"]
    data: Annotated[DigitsData | HubImages, Field(discriminator="source")]
    model: ResNet


class CausalLMConfig(RecipeConfig):
    """A recipe for `recipes/causal_lm/train.py`."""

    task: Literal["causal_lm"]
    data: Annotated[PydocData | HubText, Field(discriminator="source")]
    model: Gpt2


AnyRecipeConfig = Annotated[ImageClassificationConfig | CausalLMConfig, Field(discriminator="task")]
