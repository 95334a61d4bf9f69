"""The fields of a recipe's JSON, and how it is read and checked."""

from largebatch.config.load import last_of_each, load_config, override_words, split_overrides, task_of, validate
from largebatch.config.recipe import RecipeConfig, as_json, check, flatten
from largebatch.config.task_config import config_class_of

__all__ = [
    "RecipeConfig",
    "as_json",
    "check",
    "config_class_of",
    "flatten",
    "last_of_each",
    "load_config",
    "override_words",
    "split_overrides",
    "task_of",
    "validate",
]
