"""A validated recipe as plain data: what run folders, checkpoints and trackers hold of it."""

from collections.abc import Mapping
from typing import Any

from largebatch.config.recipe import RecipeConfig


def as_json(config: RecipeConfig) -> dict[str, Any]:
    """The recipe with every default filled in, and the name of its task, as a JSON object."""
    return {"task": config.task, **config.model_dump(mode="json", by_alias=True, exclude={"schema_"})}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names: {"batch": {"drop_last": true}} is {"batch.drop_last": true}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
