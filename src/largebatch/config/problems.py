"""Pydantic's errors, reworded for users: where, what was given, why it is wrong, and what to write instead."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from largebatch.words import did_you_mean

JsonObject = dict[str, Any]


def explained(error: ValidationError, schema: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the JSON path of each problem, "" for the whole, and what is wrong there; `schema` is the model's."""
    for details in error.errors(include_url=False):
        yield _explain(details, schema)


def _explain(details: ErrorDetails, schema: JsonObject) -> tuple[str, str]:
    kind = details["type"]
    context = details.get("ctx", {})
    where, known, field = _locate(details["loc"], schema)
    options = list(_options(field, schema))
    kinds = sorted(kind for kind, _ in options if kind is not None)
    or_null = ", or null" if (None, {"type": "null"}) in options else ""
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
        case "union_tag_not_found" | "union_tag_invalid" if kinds:
            key = context["discriminator"].strip("'")
            tag = context.get("tag")
            wrong = "missing" if tag is None else f'"{tag}" is unknown{did_you_mean(tag, kinds)}'
            return f"{where}.{key}", f"{wrong}; write one of {json.dumps(kinds)[1:-1]}{or_null}"
    # "Input should be an object" or "Input should be 'fp32' or 'bf16'", for example.
    requirement = details["msg"].replace("Input should", "must", 1).replace("'", '"')
    return where, f"given {given}; {requirement[:1].lower()}{requirement[1:]}{or_null}"


def _locate(location: Sequence[int | str], schema: JsonObject) -> tuple[str, list[str], JsonObject]:
    """The JSON path of an error, without the union tags that pydantic puts into it; the keys that are known there; and
    the schema of the field, empty if it is unknown."""
    path = ""
    known = []
    field = schema
    for part in location:
        options = [(kind, option) for kind, option in _options(field, schema) if option.get("type") != "null"]
        first = options[0][1] if options else {}
        tagged = [option for kind, option in options if part in ([kind] if kind else _tags(option))]
        if isinstance(part, int):
            path = f"{path}[{part}]"
            field = first.get("items", {})
        elif len(options) > 1 and tagged:
            field = {"anyOf": tagged}
        else:
            fields = {name: each for _, option in options for name, each in option.get("properties", {}).items()}
            path = f"{path}.{part}".lstrip(".")
            known = [name for name in fields if name != "$schema"]
            (of_any_name,) = first.get("patternProperties", {"": {}}).values()
            field = fields.get(part, of_any_name)
    return path, known, field


def _options(field: JsonObject, schema: JsonObject) -> Iterator[tuple[str | None, JsonObject]]:
    """The schemas of what a field may hold, each with the name of its kind, if it has one."""
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
        yield None, field


def _tags(option: JsonObject) -> list[Any]:
    """What a function that tells the options of a union apart may call this one: its JSON type, or a word in it."""
    return [option.get("type"), *(field.get("const") for field in option.get("properties", {}).values())]
