"""Pydantic's errors, reworded for users: where, what was given, why it is wrong, and what to write instead."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from largebatch.errors import did_you_mean

JsonObject = dict[str, Any]


def explained(error: ValidationError, schema: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the JSON path of each problem, "" for the whole, and what is wrong there; `schema` is the model's."""
    for details in error.errors(include_url=False):
        yield _explain(details, schema)


def _explain(details: ErrorDetails, schema: JsonObject) -> tuple[str, str]:
    kind, context = details["type"], details.get("ctx", {})
    where, known, field = _locate(details["loc"], schema)
    options = dict(_options(field, schema))
    or_null = ", or null" if options.pop("null", None) else ""
    given = json.dumps(details["input"], ensure_ascii=False, default=str)
    given = given if len(given) <= 60 else f"{given[:57]}…"
    match kind:
        case "extra_forbidden":
            name = where.rpartition(".")[2]
            return where, f"unknown key{did_you_mean(name, known)}; known here: {', '.join(known)}"
        case "missing":
            sentence = " ".join(field.get("description", "").split()).partition(". ")[0].rstrip(".")
            return where, "missing" + (f"; {sentence[:1].lower()}{sentence[1:]}" if sentence else "")
        case "value_error":
            return where, str(context["error"])
        case "union_tag_not_found" | "union_tag_invalid":
            key, tag = context["discriminator"].strip("'"), context.get("tag")
            wrong = "missing" if tag is None else f'"{tag}" is unknown{did_you_mean(tag, options)}'
            return f"{where}.{key}", f"{wrong}; write one of {json.dumps(sorted(options))[1:-1]}{or_null}"
    # "Input should be an object" or "Input should be 'fp32' or 'bf16'", for example.
    requirement = details["msg"].replace("Input should", "must", 1).replace("'", '"')
    return where, f"given {given}; {requirement[:1].lower()}{requirement[1:]}{or_null}"


def _locate(location: Sequence[int | str], schema: JsonObject) -> tuple[str, list[str], JsonObject]:
    """The JSON path of an error, without the union tags that pydantic puts into it; the keys that are known there; and
    the schema of the field, empty if it is unknown."""
    path, known, field = "", [], schema
    for part in location:
        options = {kind: option for kind, option in _options(field, schema) if kind != "null"}
        first = next(iter(options.values()), {})
        if len(options) > 1 and part in options:
            field = options[part]
        elif isinstance(part, int):
            path, field = f"{path}[{part}]", first.get("items", {})
        else:
            fields = {name: each for option in options.values() for name, each in option.get("properties", {}).items()}
            path, known = f"{path}.{part}".lstrip("."), [name for name in fields if name != "$schema"]
            (of_any_name,) = first.get("patternProperties", {"": {}}).values()
            field = fields.get(part, of_any_name)
    return path, known, field


def _options(field: JsonObject, schema: JsonObject) -> Iterator[tuple[Any, JsonObject]]:
    """The schemas of what a field may hold, each with the tag by which pydantic tells it from the others: the name of
    its kind or, in a union of JSON types, its type."""
    if "$ref" in field:
        field = schema["$defs"][field["$ref"].rpartition("/")[2]]
    if "discriminator" in field:
        for kind, option in field["discriminator"]["mapping"].items():
            # A kind that is itself a union of kinds has no reference.
            yield kind, option if isinstance(option, dict) else schema["$defs"][option.rpartition("/")[2]]
    elif union := field.get("anyOf") or field.get("oneOf"):
        for option in union:
            yield from _options(option, schema)
    else:
        yield field.get("type"), field
