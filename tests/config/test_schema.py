"""The published JSON Schema is the one the code has, and recipes keep to it."""

import json

import jsonschema
import pytest

from largebatch.config.schema import recipe_schema
from paths import RECIPES, ROOT

SCHEMA_FILE = ROOT / "recipes/recipe.schema.json"


def test_schema_is_fresh():
    assert SCHEMA_FILE.read_text() == recipe_schema(), "run: largebatch schema > recipes/recipe.schema.json"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_the_schema_and_keep_to_it(recipe):
    raw = json.loads(recipe.read_text())
    assert (recipe.parent / raw["$schema"]).resolve() == SCHEMA_FILE
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(raw)


def test_schema_refuses_what_the_loader_refuses():
    raw = json.loads(RECIPES[0].read_text())
    raw["batch"]["global_batch_sise"] = 1
    assert not jsonschema.Draft202012Validator(json.loads(recipe_schema())).is_valid(raw)


def test_every_field_is_described():
    """A field without a sentence helps nobody in an editor."""
    definitions = json.loads(recipe_schema())["$defs"]
    bare = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, schema in definition.get("properties", {}).items()
        if "description" not in schema
        and "const" not in schema
        and "$ref" not in schema
        and "discriminator" not in schema
    ]
    assert bare == []
