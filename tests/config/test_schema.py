"""Each task's published JSON Schema and page are what its code says, and recipes keep to it."""

import json
import re
import runpy

import jsonschema
import pytest

from largebatch.__main__ import main
from largebatch.task_folders import SCHEMA
from largebatch.tools.schema import recipe_schema
from paths import PYDOC, RECIPES, ROOT
from tasks import TASKS, copy

FOLDERS = [ROOT / "recipes" / task for task in TASKS]
PAGE = ROOT / "docs/configuration.md"
TABLES = runpy.run_path(str(ROOT / "docs/recipe_tables.py"))


def test_what_is_published_is_fresh():
    assert main(["schema", "--check", *map(str, FOLDERS)]) == 0, "run: make schemas"
    written = runpy.run_path(str(PAGE.with_name("configuration_page.py")))["page"]()
    assert PAGE.read_text(encoding="utf-8") == written, "run: make schemas"
    for page, text in TABLES["pages"]().items():
        assert page.read_text(encoding="utf-8") == text, f"{page}: run: make schemas"


def test_what_is_stale_is_told(tmp_path, capsys):
    folder = copy("causal_lm", tmp_path)
    (folder / SCHEMA).write_text("{}")
    assert main(["schema", "--check", str(folder)]) == 1
    told = f"{folder / SCHEMA} does not match config.py; run largebatch schema without --check\n"
    assert capsys.readouterr().out == told
    # Which recipes/*/ names, too.
    assert main(["schema", str(folder), str(tmp_path / "accelerate_configs")]) == 0
    assert main(["schema", "--check", str(folder)]) == 0
    assert main(["schema", str(tmp_path)]) == 2
    assert main(["schema", "--check", str(folder), str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_the_schema_and_keep_to_it(recipe):
    raw = json.loads(recipe.read_text())
    assert raw["$schema"] == SCHEMA
    jsonschema.Draft202012Validator(json.loads(recipe.with_name(SCHEMA).read_text())).validate(raw)


def test_schema_refuses_what_the_loader_refuses():
    raw = json.loads(PYDOC.read_text())
    raw["batch"]["global_batch_sise"] = 1
    assert not jsonschema.Draft202012Validator(json.loads(recipe_schema(PYDOC.parent))).is_valid(raw)


@pytest.mark.parametrize("folder", FOLDERS, ids=TASKS)
def test_every_field_is_described(folder):
    """A field without a sentence helps nobody in an editor."""
    definitions = json.loads(recipe_schema(folder))["$defs"]
    bare = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, schema in definition.get("properties", {}).items()
        if not {"description", "const", "$ref", "discriminator"} & schema.keys()
    ]
    assert bare == []


def test_the_page_has_every_section_once_and_all_its_fields():
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^### (\S+)$", text, re.MULTILINE)
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= {heading.lower() for heading in headings}
    for folder in FOLDERS:
        for name, definition in json.loads(recipe_schema(folder))["$defs"].items():
            assert headings.count(name) == 1
            table = text.split(f"\n### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
            assert re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE) == list(definition["properties"])
