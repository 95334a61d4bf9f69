"""One config class a task: the shared sections plus that task's `data` and `model`."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from largebatch.config.contrastive import ConvNet, Neighbours, NtXent, Projection, ViewedImages, Views
from largebatch.config.data import Data, DigitsData, HubImages, HubText, PydocData
from largebatch.config.masked_lm import Bert, MaskedHubText, MaskedPydoc
from largebatch.config.models import Gpt2, Llama, Model, ResNet, Vit
from largebatch.config.optimizers import AnyOptimizer, OptimizerSection, registered_optimizers
from largebatch.config.sections import (
    Batch,
    BelowOne,
    Checkpoint,
    Compute,
    Evaluation,
    Faults,
    LearningRate,
    Logging,
    NonNegativeInt,
    PositiveFloat,
    Section,
    Train,
    Verify,
)
from largebatch.config.sft import AdditionData, AutoCausalLM, HubPairs


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
    optimizer: Annotated[OptimizerSection, AnyOptimizer()]
    train: Train
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    compute: Compute = Compute()
    logging: Logging = Logging()
    verify: Verify | None = None
    """How `largebatch verify` makes the model small enough to rehearse; null leaves it as it is."""

    _built_with: ClassVar[list[type[OptimizerSection]]] = []

    @classmethod
    def current(cls) -> type[Self]:
        """This class, which takes every optimizer that is registered by now."""
        sections = [entry.section for entry in registered_optimizers()]
        if cls._built_with != sections:
            cls.model_rebuild(force=True)
            cls._built_with = sections
        return cls

    @property
    def couples_the_batch(self) -> bool:
        """Whether the loss of a sample depends on all others of its global batch."""
        return False


class CrossEntropy(Section):
    """What the cross-entropy of training is of; evaluations are of plain images and labels."""

    label_smoothing: BelowOne = 0.0
    """Part of each label that is spread over all classes (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""
    mixup_alpha: PositiveFloat | None = None
    """Images and labels are mixed in pairs, weighted by a draw from Beta(alpha, alpha) (Zhang et al. 2018, arXiv
    1710.09412); null mixes none. Pairs are samples that follow one another, so `batch.micro_batch_size` must be
    even."""


class ImageClassificationConfig(RecipeConfig):
    """A recipe for `recipes/image_classification/train.py`."""

    task: Literal["image_classification"]
    data: Annotated[DigitsData | HubImages, Field(discriminator="source")]
    model: Annotated[ResNet | Vit, Field(discriminator="architecture")]
    loss: CrossEntropy = CrossEntropy()


class CausalLMConfig(RecipeConfig):
    """A recipe for `recipes/causal_lm/train.py`."""

    task: Literal["causal_lm"]
    data: Annotated[PydocData | HubText, Field(discriminator="source")]
    model: Annotated[Gpt2 | Llama, Field(discriminator="architecture")]


class ContrastiveConfig(RecipeConfig):
    """A recipe for `recipes/contrastive/train.py`."""

    task: Literal["contrastive"]
    data: Annotated[DigitsData | ViewedImages, Field(discriminator="source")]
    views: Views
    model: Annotated[ResNet | ConvNet, Field(discriminator="architecture")]
    projection: Projection
    loss: NtXent
    neighbours: Neighbours = Neighbours()

    @property
    def couples_the_batch(self) -> bool:
        return True


class MaskedLMConfig(RecipeConfig):
    """A recipe for `recipes/masked_lm/train.py`."""

    task: Literal["masked_lm"]
    data: Annotated[MaskedPydoc | MaskedHubText, Field(discriminator="source")]
    model: Bert


class SftConfig(RecipeConfig):
    """A recipe for `recipes/sft/train.py`."""

    task: Literal["sft"]
    data: Annotated[AdditionData | HubPairs, Field(discriminator="source")]
    model: AutoCausalLM


AnyRecipeConfig = Annotated[
    ImageClassificationConfig | CausalLMConfig | ContrastiveConfig | MaskedLMConfig | SftConfig,
    Field(discriminator="task"),
]
