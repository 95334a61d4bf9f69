"""`largebatch schema`: the JSON Schema of a task's recipes, for editors."""

import argparse
import json
from pathlib import Path

from largebatch.config import config_class_of
from largebatch.task_folders import SCHEMA
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS

EPILOG = """examples:
  largebatch schema recipes/my_task
  largebatch schema --check recipes/*/"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="task folders, which have a config.py")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")


def run(options: argparse.Namespace) -> int:
    """Write DIR/recipe.schema.json, the $schema of the recipes in a task's folder, for editors. It includes the
    optimizers that its `Config` lists.
    """
    code = 0
    for folder in options.folders:
        # recipes/*/ also matches this one, which is no task's.
        if folder.name == ACCELERATE_CONFIGS.name:
            continue
        file = folder / SCHEMA
        text = recipe_schema(folder)
        if not options.check:
            file.write_text(text, encoding="utf-8")
            print(f"written to {file}")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{file} does not match config.py; run largebatch schema without --check")
            code = 1
    return code


def recipe_schema(folder: Path) -> str:
    """Return the text of a task folder's JSON Schema.

    Raises:
        ConfigError: Its `config.py` cannot be used.
    """
    schema = config_class_of(folder).model_json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A recipe"}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
