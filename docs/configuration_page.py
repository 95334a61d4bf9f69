"""Write docs/configuration.md: the fields of all tasks' recipes, as a page in Markdown.

    python docs/configuration_page.py

What stands above `SHARED` in the page is written by hand, and stays.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from largebatch.tools.schema import recipe_schema

PAGE = Path(__file__).with_name("configuration.md")
RECIPES = PAGE.parent.parent / "recipes"
UNBOUNDED = 1e12  # maxima from here on only keep numbers exact, and are not shown
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TABLE = "| field | values | default | description |\n| --- | --- | --- | --- |"
SHARED = "## Fields of every task"


def page() -> str:
    """Return the whole page, as it should be."""
    tasks = sorted(file.parent for file in RECIPES.glob("*/config.py"))
    schemas = {task.name: json.loads(recipe_schema(task)) for task in tasks}
    return PAGE.read_text(encoding="utf-8").partition(SHARED)[0] + tables(schemas)


def tables(schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the fields in tasks' schemas by name: what they share once, then what only one of them has."""
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
