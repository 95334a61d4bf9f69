"""What a recipe's JSON may say."""

from largebatch.config.load import RECIPE_CONFIGS, load_config, validate
from largebatch.config.resolved import as_json, flatten
from largebatch.config.tasks import (
    CausalLMConfig,
    ContrastiveConfig,
    ImageClassificationConfig,
    MaskedLMConfig,
    RecipeConfig,
    SftConfig,
)

__all__ = [
    "RECIPE_CONFIGS",
    "CausalLMConfig",
    "ContrastiveConfig",
    "ImageClassificationConfig",
    "MaskedLMConfig",
    "RecipeConfig",
    "SftConfig",
    "as_json",
    "flatten",
    "load_config",
    "validate",
]
