"""`largebatch schema`: the JSON Schema of a task's recipes, for editors, and the same as a page to read."""

import argparse
import json
from pathlib import Path
from typing import Any

from largebatch.errors import UserError
from largebatch.task_folders import SCHEMA
from largebatch.tools.options import Commands, add_command

PAGE = "configuration.md"
INTRODUCTION = """<!-- Made by `largebatch schema --markdown DIR` from config.py: change that, not this. -->

Everything a recipe's JSON can contain. Values are not converted (`"3"` is not a number), unknown fields are errors, and
all problems are reported at once, each with what to write instead; so are contradictions.

On the command line a field is overridden by its path, in `plan`, `verify`, `submit`, batch scripts and runs alike:
`--batch.global_batch_size 512`, `--optimizer.clip_norm null`, `--train.duration '{"epochs": 3}'`. What is not JSON is
a string."""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "schema",
        run,
        help="write the JSON Schema of a task's recipes",
        description=f"Write DIR/{SCHEMA}, the $schema of the recipes in a task's folder, for editors. It has the "
        "optimizers that the folder's config.py registers.",
        epilog="""examples:
  largebatch schema recipes/my_task
  largebatch schema --check recipes/*/""",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="folders of tasks, with their config.py")
    parser.add_argument(
        "--markdown", action="store_true", help=f"also write DIR/{PAGE}, a page to read; needs jsonschema-markdown"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")


def run(options: argparse.Namespace) -> int:
    """Write, or check."""
    # recipes/*/ has other folders than those of tasks.
    folders = [folder for folder in options.folders if (folder / "config.py").is_file() or not folder.is_dir()]
    folders = folders or options.folders
    texts = {folder / SCHEMA: recipe_schema(folder) for folder in folders}
    if options.markdown:
        texts |= {folder / PAGE: configuration_page(folder) for folder in folders}
    if options.check:
        stale = [file for file, text in texts.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
        for file in stale:
            print(f"{file} is not what config.py says; run largebatch schema {file.parent}")
        return 1 if stale else 0
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
        print(f"written to {file}")
    return 0


def recipe_schema(folder: Path) -> str:
    """Return the text of a task folder's JSON Schema.

    Raises:
        ConfigError: Its `config.py` cannot be used.
    """
    from largebatch.config import config_class_of

    schema = config_class_of(folder).model_json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A recipe"}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def configuration_page(folder: Path) -> str:
    """Return the configuration of a task's recipes as a page in Markdown.

    Raises:
        UserError: jsonschema-markdown, which makes it, is not installed.
    """
    try:
        from jsonschema_markdown import generate
    except ModuleNotFoundError as error:
        raise UserError("--markdown needs jsonschema-markdown; pip install jsonschema-markdown") from error
    schema = json.loads(recipe_schema(folder))
    page = _to_read(schema, schema["$defs"])
    page |= {"title": f"Configuration of {folder.resolve().name}", "description": INTRODUCTION}
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
