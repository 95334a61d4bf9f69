"""`largebatch schema`: the JSON Schema of a task's recipes, for editors, and the sections of several as a page."""

import argparse
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from largebatch.config import config_class_of
from largebatch.task_folders import SCHEMA
from largebatch.tools.options import Commands, add_command

UNBOUNDED = 1e12  # maxima from here on only keep numbers exact, and are not shown
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TABLE = "| field | values | default | description |\n| --- | --- | --- | --- |"
SHARED = "## Fields of every task"  # what stands above this in a page is written by hand


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "schema",
        run,
        description=f"Write DIR/{SCHEMA}, the $schema of the recipes in a task's folder, for editors. It includes "
        "the optimizers that its `Config` lists.",
        epilog="""examples:
  largebatch schema recipes/my_task
  largebatch schema --check recipes/*/
  largebatch schema --page docs/configuration.md recipes/*/""",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="task folders, which have a config.py")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write all fields to a page in Markdown")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")


def run(options: argparse.Namespace) -> int:
    """Write or check the files; 1 if one is not up to date."""
    # recipes/*/ also matches folders that are not tasks'.
    folders = [folder for folder in options.folders if (folder / "config.py").is_file() or not folder.is_dir()]
    folders = folders or options.folders
    texts = {folder / SCHEMA: recipe_schema(folder) for folder in folders}
    if options.page:
        schemas = {file.resolve().parent.name: json.loads(text) for file, text in texts.items()}
        old = options.page.read_text(encoding="utf-8") if options.page.is_file() else "# Configuration\n\n"
        texts[options.page] = old.partition(SHARED)[0] + configuration_page(schemas)
    if options.check:
        stale = [file for file, text in texts.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
        for file in stale:
            print(f"{file} does not match config.py; run largebatch schema without --check")
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
    schema = config_class_of(folder).model_json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A recipe"}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def configuration_page(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the fields in tasks' schemas by name, as a page: what they share once, then what only one of them has."""
    roots = list(schemas.values())
    shared_fields = [
        name
        for name, field in roots[0]["properties"].items()
        if all(root["properties"].get(name) == field for root in roots)
    ]
    tasks_by_section = defaultdict(list)
    for task, schema in schemas.items():
        for name, section in schema["$defs"].items():
            tasks_by_section[name, json.dumps(section)].append(task)
    parts = [SHARED, _table(roots[0], shared_fields)]
    for (name, section), tasks in sorted(tasks_by_section.items()):
        if len(tasks) > 1:
            parts += _section(name, json.loads(section))
    for task, schema in schemas.items():
        own_fields = schema["properties"].keys() - set(shared_fields)
        parts += [f"## Fields of {task}", schema["description"], _table(schema, own_fields)]
        for name, section in schema["$defs"].items():
            if tasks_by_section[name, json.dumps(section)] == [task]:
                parts += _section(name, section)
    return "\n\n".join(parts) + "\n"


def _section(name: str, section: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield section["description"]
    yield _table(section, section["properties"])


def _table(section: Mapping[str, Any], names: Collection[str]) -> str:
    rows = [TABLE]
    for name, field in section["properties"].items():
        if name in names:
            default = field.get("default")
            shown = f"`{json.dumps(default)}`" if "default" in field and not isinstance(default, dict) else ""
            required = "required" if name in section.get("required", ()) else ""
            description = " ".join(field.get("description", "").split())
            rows.append(f"| `{name}` | {_values(field)} | {required or shown} | {description} |".replace("  ", " "))
    return "\n".join(rows)


def _values(field: Mapping[str, Any]) -> str:
    """What a field may be, in a few words with links to sections."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field or "oneOf" in field:
        return " or ".join(_values(each) for each in field.get("anyOf") or field["oneOf"])
    if "enum" in field or "const" in field:
        return " ".join(f"`{json.dumps(value)}`" for value in field.get("enum") or [field["const"]])
    if field["type"] == "null":
        return "`null`"
    if field["type"] == "array":
        items = field.get("prefixItems") or [field["items"]]
        return f"list of {', '.join(_values(each) for each in items)}"
    bounds = [f"{sign} {field[key]:g}" for key, sign in BOUNDS.items() if key in field and field[key] < UNBOUNDED]
    return " ".join([field["type"], *bounds])
