"""What a recipe's JSON may say."""

from largebatch.config.load import config_class_of, load_config, validate
from largebatch.config.recipe import RecipeConfig, check
from largebatch.config.resolved import as_json, flatten

__all__ = ["RecipeConfig", "as_json", "check", "config_class_of", "flatten", "load_config", "validate"]
