"""`largebatch schema`: the JSON Schema of all recipes, with which editors check them; or the same as a page to read."""

import argparse
import json
import sys
from typing import Any

from largebatch.errors import UserError
from largebatch.tools.options import Commands, add_command

INTRODUCTION = """<!-- Made by `largebatch schema --markdown` from src/largebatch/config: change that, not this. -->

All that a recipe's JSON may say, by task: {tasks}.
Values are not converted (`"3"` is not a number), unknown fields are errors, and all problems are reported at once, each
with what to write instead; so are contradictions.

On the command line a field is overridden by its path, in `plan`, `verify`, `submit`, batch scripts and runs alike:
`--batch.global_batch_size 512`, `--optimizer.clip_norm null`, `--train.duration '{{"epochs": 3}}'`. What is not JSON is
a string."""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "schema",
        run,
        help="print the JSON Schema of recipes",
        description="Print the JSON Schema that recipes name in their $schema, for editors.",
        epilog="""examples:
  largebatch schema > recipes/recipe.schema.json
  largebatch schema --markdown > docs/configuration.md""",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the configuration reference instead; needs jsonschema-markdown"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schema, or the page made from it."""
    sys.stdout.write(configuration_reference() if options.markdown else recipe_schema())
    return 0


def recipe_schema() -> str:
    """Return the text of `recipes/recipe.schema.json`."""
    from pydantic import TypeAdapter

    from largebatch.config import RECIPE_CONFIGS
    from largebatch.config.tasks import AnyRecipeConfig

    # With the optimizers that are registered.
    for config_class in RECIPE_CONFIGS.values():
        config_class.current()
    schema = TypeAdapter(AnyRecipeConfig).json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A largebatch recipe", **schema}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def configuration_reference() -> str:
    """Return the text of `docs/configuration.md`.

    Raises:
        UserError: jsonschema-markdown, which makes it, is not installed.
    """
    try:
        from jsonschema_markdown import generate
    except ModuleNotFoundError as error:
        raise UserError("--markdown needs jsonschema-markdown; pip install jsonschema-markdown") from error
    schema = json.loads(recipe_schema())
    names = (reference.rpartition("/")[2] for reference in schema["discriminator"]["mapping"].values())
    tasks = ", ".join(f"[{name}](#{name.lower()})" for name in names)
    page = _to_read(schema, schema["$defs"]) | {
        "title": "Configuration",
        "description": INTRODUCTION.format(tasks=tasks),
    }
    text: str = generate(page, footer=False, hide_empty_columns=True)
    return text.replace(" x `", " x`").replace("\n### Type: `object(?)`\n", "").rstrip() + "\n"


def _to_read(node: Any, definitions: dict[str, Any]) -> Any:
    """The schema without what only programs need, and each field that is a section with the section's first line."""
    from largebatch.config.sections import LARGEST_FLOAT, LARGEST_INT

    if isinstance(node, list):
        return [_to_read(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    section = definitions.get(node["$ref"].rpartition("/")[2], {}) if isinstance(node.get("$ref"), str) else {}
    described = {"description": section["description"].partition("\n")[0]} if "description" in section else {}
    return described | {
        name: " ".join(value.split())
        if name == "description" and isinstance(value, str)
        else _to_read(value, definitions)
        for name, value in node.items()
        if not (name == "additionalProperties" and value is False)
        and not (name == "maximum" and value in (LARGEST_INT, LARGEST_FLOAT))
        and not (name == "default" and isinstance(value, dict))
    }
