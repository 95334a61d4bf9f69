"""The configuration reference: all that a recipe's JSON may say, in Markdown, from the typed models."""

import json
from collections.abc import Container, Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter

from largebatch.config.sections import LARGEST_FLOAT, LARGEST_INT
from largebatch.config.tasks import AnyRecipeConfig

INTRODUCTION = """# Configuration

<!-- Made by `largebatch schema --markdown` from the typed models in src/largebatch/config: change those, not this. -->

All that a recipe's JSON may say. Values are not converted (`"3"` is no number), unknown fields are errors, and all
problems are reported at once, each with what to write instead; so is what contradicts itself.

On the command line a field is overridden by its path, in `plan`, `verify`, `submit`, batch scripts and runs alike:
`--batch.global_batch_size 512`, `--optimizer.clip_norm null`, `--train.duration '{"epochs": 3}'`. What is no JSON is a
string.
"""
ABSENT = {"maximum": (LARGEST_INT, LARGEST_FLOAT)}
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "string",
    "boolean": "`true` or `false`",
    "null": "`null`",
}

Schema = dict[str, Any]


def configuration_reference() -> str:
    """The text of `docs/configuration.md`."""
    schema = TypeAdapter(AnyRecipeConfig).json_schema()
    definitions: dict[str, Schema] = schema["$defs"]
    tasks = {name: definitions[_target(ref)] for name, ref in schema["discriminator"]["mapping"].items()}
    first, *others = (task["properties"] for task in tasks.values())
    shared = {name for name, field in first.items() if all(other.get(name) == field for other in others)}
    lines = [INTRODUCTION, "## Every recipe", "", *_table(next(iter(tasks.values())), shared, definitions)]
    for name, task in tasks.items():
        own = task["properties"].keys() - shared
        lines += ["", f"## {name}", "", task["description"], "", *_table(task, own, definitions)]
    lines += ["", "## Sections"]
    for name in _mentioned([*tasks.values()], definitions):
        section = definitions[name]
        table = _table(section, section["properties"], definitions)
        lines += ["", f"### {name}", "", _line(section["description"]), "", *table]
    return "\n".join(lines) + "\n"


def _mentioned(schemas: Iterable[Schema], definitions: dict[str, Schema]) -> list[str]:
    """The sections that schemas lead to, each where it is first mentioned, with its own right behind it."""
    found: list[str] = []
    for schema in schemas:
        for name in _references(schema.get("properties", {})):
            if name not in found:
                found.append(name)
                found += [each for each in _mentioned([definitions[name]], definitions) if each not in found]
    return found


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _target(schema["$ref"])
        # The mapping of a discriminator says the same once more.
        yield from (name for key, value in schema.items() if key != "discriminator" for name in _references(value))
    elif isinstance(schema, list):
        yield from (name for value in schema for name in _references(value))


def _target(reference: str) -> str:
    return reference.rpartition("/")[2]


def _table(section: Schema, names: Container[str], definitions: dict[str, Schema]) -> list[str]:
    required = section.get("required", ())
    rows = ["| field | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section["properties"].items():
        if name not in names:
            continue
        default = "required" if name in required else _default(field.get("default"))
        meaning = field.get("description") or definitions.get(_target(field.get("$ref", "")), {}).get("description", "")
        cells = (f"`{name}`", _values(field), default, _line(meaning))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return rows


def _default(value: object) -> str:
    # A section's own defaults are in its own table.
    return "its defaults" if isinstance(value, dict) else f"`{json.dumps(value)}`"


def _values(schema: Schema) -> str:
    """What may be written, in words."""
    if "$ref" in schema:
        name = _target(schema["$ref"])
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if choices := schema.get("oneOf") or schema.get("anyOf"):
        return " or ".join(_values(choice) for choice in choices)
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_values(item) for item in schema['prefixItems'])}]"
        return f"list of {_values(schema['items'])}"
    if schema.get("type") == "object":
        return "object"
    bounds = [
        f"{sign} {schema[name]:g}"
        for name, sign in BOUNDS.items()
        if name in schema and schema[name] not in ABSENT.get(name, ())
    ]
    return " ".join([TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _line(text: str) -> str:
    return " ".join(text.split())
