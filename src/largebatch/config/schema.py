"""The JSON Schema of all recipes, with which editors complete and check them."""

import json

from pydantic import TypeAdapter

from largebatch.config.tasks import AnyRecipeConfig


def recipe_schema() -> str:
    """The text of `recipes/recipe.schema.json`."""
    schema = TypeAdapter(AnyRecipeConfig).json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A largebatch recipe", **schema}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
