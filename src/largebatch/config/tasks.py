"""One config class a task: the shared sections plus that task's `data` and `model`."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from largebatch.config.data import AdditionData, Data, DigitsData, HubImages, HubPairs, HubText, PydocData
from largebatch.config.models import AutoCausalLM, Gpt2, Model, ResNet
from largebatch.config.optimizers import Optimizer
from largebatch.config.sections import (
    Batch,
    Checkpoint,
    Evaluation,
    Faults,
    LearningRate,
    Logging,
    NonNegativeInt,
    Section,
    Train,
    Verify,
)


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


class SftConfig(RecipeConfig):
    """A recipe for `recipes/sft/train.py`."""

    task: Literal["sft"]
    data: Annotated[AdditionData | HubPairs, Field(discriminator="source")]
    model: AutoCausalLM


AnyRecipeConfig = Annotated[ImageClassificationConfig | CausalLMConfig | SftConfig, Field(discriminator="task")]
