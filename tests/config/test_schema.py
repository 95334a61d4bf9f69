"""The published JSON Schema is the one the code has, and recipes keep to it."""

import json
import re

import jsonschema
import pytest

from largebatch.tools.schema import configuration_reference, recipe_schema
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


def test_the_reference_is_fresh():
    written = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert written == configuration_reference(), "run: largebatch schema --markdown > docs/configuration.md"


def test_rows_of_the_reference_by_hand():
    rows = configuration_reference().splitlines()
    for row in (
        "| every | `integer` |  | `0 < x` | `10` | Steps between two lines of metrics.jsonl; the first and the last "
        "step always have one. |",
        "| last_step | `integer` | ✅ | `0 < x` | The last of them. |",
        "| final_fraction | `number` |  | `0 <= x <= 1` | `0.0` | Learning rate at the end, as a fraction of the "
        "peak. |",
        "| faults | `object` |  | [Faults](#faults) |  | What to do when something goes wrong. |",
    ):
        assert row in rows


def test_the_reference_has_every_section_once_and_all_its_fields():
    text = configuration_reference()
    headings = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= {heading.lower() for heading in headings}
    for name, definition in json.loads(recipe_schema())["$defs"].items():
        assert headings.count(name) == 1
        table = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert sorted(re.findall(r"^\| (\S+) \| `", table, re.MULTILINE)) == sorted(definition["properties"])
