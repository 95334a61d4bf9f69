"""The fields of a recipe's JSON, and how it is read and checked."""

from largebatch.config.load import (
    check_together,
    last_of_each,
    load_config,
    load_sections,
    override_words,
    split_overrides,
    task_of,
    validate,
)
from largebatch.config.recipe import RecipeConfig, as_json, check, flatten
from largebatch.config.task_config import config_class_of

__all__ = [
    "RecipeConfig",
    "as_json",
    "check",
    "check_together",
    "config_class_of",
    "flatten",
    "last_of_each",
    "load_config",
    "load_sections",
    "override_words",
    "split_overrides",
    "task_of",
    "validate",
]
