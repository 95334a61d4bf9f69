"""Reading a recipe: JSON plus overrides, validated as a whole, every problem reported at once."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from largebatch.config.partial import valid_part
from largebatch.config.recipe import RecipeConfig
from largebatch.config.task_config import authors_program, config_class_of
from largebatch.errors import ConfigError, did_you_mean
from largebatch.task_folders import folder_of

Config = TypeVar("Config", bound=RecipeConfig)
JsonObject = dict[str, Any]


def load_config(path: str | Path, overrides: Sequence[str] = (), config_class: type[Config] | None = None) -> Config:
    """Read and validate a recipe, as the `Config` of the `config.py` in its folder.

    Args:
        path: The recipe's JSON file.
        overrides: Command-line words such as `["--batch.global_batch_size", "512", "--seed=1"]`. Values are JSON;
            what is not JSON is taken as a string.
        config_class: The `Config` that the caller can run; None accepts every task's.

    Raises:
        ConfigError: All problems of the file and the overrides, one line each; or `config.py` cannot be used.
    """
    raw = _read_json(Path(path))
    _apply_overrides(raw, overrides)
    found = config_class_of(Path(path).parent, path)
    if config_class is not None and found is not config_class:
        raise ConfigError(
            [f"the train.py beside it runs it, in {Path(path).parent}; this one is another task's"], str(path)
        )
    return validate(raw, found, source=str(path))  # type: ignore[return-value]  # it is `config_class`


def validate(raw: JsonObject, config_class: type[Config], source: str | None = None) -> Config:
    """Validate the parsed JSON of a recipe; `source` names it in errors.

    Raises:
        ConfigError: All problems, one line each.
    """
    config_class = config_class.with_optimizers()
    with authors_program(folder_of(config_class.__module__)):
        try:
            # Strict validation takes tuples only from JSON, where they are lists.
            config: RecipeConfig | None = config_class.model_validate_json(json.dumps(raw))
            problems: list[str] = []
        except ValidationError as error:
            problems = [_explain(details, config_class) for details in error.errors(include_url=False)]
            config = _valid_part(config_class, raw)
        if config is not None:
            problems += _inconsistencies(config, is_whole=not problems)
    if problems:
        raise ConfigError(problems, source)
    return cast(Config, config)


def _valid_part(config_class: type[Config], raw: JsonObject) -> RecipeConfig | None:
    try:
        return cast(RecipeConfig | None, valid_part(config_class, raw))
    except Exception:
        # A default that is made of what is wrong, say. The problems have been told.
        return None


def _inconsistencies(config: RecipeConfig, is_whole: bool) -> Iterator[str]:
    for check in type(config).checks():
        try:
            found = check(config)
            if not isinstance(found, Iterator):
                what = f"{inspect.getsourcefile(check)}: {check.__qualname__} returned {found!r}"
                raise ConfigError([f"{what}; a check yields its problems"])
            yield from found
        except Exception:
            # It has read what is missing or wrong, which has been told.
            if is_whole:
                raise


# --- JSON and overrides -------------------------------------------------------------------------------------------


FORMER_OPTIONS = {"--run_dir": "--run-dir", "--resume.allow_change": "--allow-change"}


def _read_json(path: Path) -> JsonObject:
    def refuse_duplicates(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
        result: JsonObject = {}
        for key, value in pairs:
            if key in result:
                raise ConfigError([f"{key}: given twice in the same object; keep one"], str(path))
            result[key] = value
        return result

    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicates)
    except FileNotFoundError:
        raise ConfigError(["no such file; give the path of a recipe's JSON, before any overrides"], str(path)) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            [f"not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}"], str(path)
        ) from None
    except ConfigError:
        raise
    # Besides files: text that is not UTF-8, integers of thousands of digits, nesting without end.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"cannot be read: {error}"], str(path)) from None
    if not isinstance(raw, dict):
        raise ConfigError(["must be a JSON object, { … }"], str(path))
    return raw


def _apply_overrides(raw: JsonObject, overrides: Sequence[str]) -> None:
    words = iter(overrides)
    problems = []
    for word in words:
        name, equals, text = word.partition("=")
        if not name.startswith("--") or not name[2:]:
            problems.append(f"{word}: not an option; overrides are written --section.field value")
            continue
        if not equals:
            value = next(words, None)
            if value is None:
                problems.append(f"{name}: has no value; write {name} VALUE")
                continue
            text = value
        if name in FORMER_OPTIONS:
            problems.append(f"{name}: options are spelled with dashes; write {FORMER_OPTIONS[name]}")
            continue
        *sections, field = name[2:].split(".")
        target = raw
        for section in sections:
            # null and absent sections become objects: `--learning_rate.warmup.start zero` where warmup is null.
            inner = target.get(section)
            target[section] = inner if isinstance(inner, dict) else {}
            target = target[section]
        target[field] = _parse_value(text)
    if problems:
        raise ConfigError(problems, "the command line")


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# --- explaining pydantic's errors ---------------------------------------------------------------------------------


def _explain(details: ErrorDetails, config_class: type[RecipeConfig]) -> str:
    """One line: where, what was given, why it is wrong, what to write instead."""
    kind, context = details["type"], details.get("ctx", {})
    where, siblings = _locate(details["loc"], config_class)
    given = _show(details["input"])
    if kind == "extra_forbidden":
        if where in FORMER:
            return f"{where}: {FORMER[where]}"
        name = where.rpartition(".")[2]
        return f"{where}: unknown key{did_you_mean(name, siblings)}; known here: {', '.join(siblings)}"
    if kind == "missing":
        return f"{where}: missing{_sentence(where, config_class)}"
    if kind == "value_error":
        return f"{where}: {context['error']}"
    if kind == "union_tag_not_found":
        key = str(context["discriminator"]).strip("'")
        return f"{where}.{key}: missing; it says which kind of {where.rpartition('.')[2]} this is"
    if kind == "union_tag_invalid":
        key = str(context["discriminator"]).strip("'")
        expected = str(context["expected_tags"]).replace("'", '"')
        meant = did_you_mean(context["tag"], re.findall(r'"(.*?)"', expected))
        return f'{where}.{key}: "{context["tag"]}" is unknown{meant}; write one of {expected}'
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", '"')
        return f"{where}: {given} is not allowed; write {expected}"
    return f"{where}: given {given}; {_requirement(kind, context, details['msg'])}"


def _requirement(kind: str, context: dict[str, Any], message: str) -> str:
    bounds = {
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be below {lt}",
        "less_than_equal": "must be at most {le}",
    }
    types = {
        "int_type": "write a whole number, such as 64",
        "int_from_float": "write a whole number, such as 64",
        "float_type": "write a number, such as 0.1",
        "finite_number": "write a finite number, such as 0.1",
        "bool_type": "write true or false",
        "string_type": "write a string in double quotes",
        "list_type": "write a list, [ … ]",
        "tuple_type": "write a list, [ … ]",
        "model_type": "write an object, { … }",
        "model_attributes_type": "write an object, { … }",
        "dict_type": "write an object, { … }",
    }
    if kind in bounds:
        return bounds[kind].format(**context)
    return types.get(kind, message[:1].lower() + message[1:])


FORMER = {
    "task": "a recipe's task is the folder that it lies in; remove it",
    "batch.last": 'write "batch": {"drop_last": true}, or false to keep a smaller last batch',
    "optimizer.moments": "it is beta_scaling now",
    "data.unusable": 'it is on_invalid now; write "refuse" or "skip"',
    "neighbours": "it is neighbors now",
    "verify": 'its model is debug_model now; write "debug_model": { … }',
}
"""Fields of earlier versions, and what to write instead."""

# What pydantic calls the alternatives of `sections.GlobalBatchSize`.
JSON_TYPE_OF_TAG = {"number": "integer", "list": "array", "ramp": "object"}


def _locate(location: Sequence[int | str], config_class: type[RecipeConfig]) -> tuple[str, list[str]]:
    """The JSON path of an error, without the union tags that pydantic puts into it, and the keys known there."""
    schema: Any = TypeAdapter(config_class).json_schema()
    definitions = schema.get("$defs", {})
    path = ""
    keys = list(schema["properties"])
    node: Any = schema
    for part in location:
        node = _resolve(node, definitions)
        if isinstance(part, int):
            path += f"[{part}]"
            node = node.get("items", {})
            continue
        tags = node.get("discriminator", {}).get("mapping", {})
        if part in tags:
            node = _resolve({"$ref": tags[part]}, definitions)
            keys = list(node.get("properties", keys))
            continue
        if "oneOf" in node and part in JSON_TYPE_OF_TAG:
            options = (_resolve(option, definitions) for option in node["oneOf"])
            node = next(option for option in options if option["type"] == JSON_TYPE_OF_TAG[part])
            keys = list(node.get("properties", keys))
            continue
        keys = list(node.get("properties", keys))
        path += f".{part}" if path else part
        node = node.get("properties", {}).get(part, {})
    return path or "the whole file", [key for key in keys if key != "$schema"]


def _resolve(node: Any, definitions: dict[str, Any]) -> Any:
    """Follow a reference, and the one real alternative of an optional section."""
    while True:
        if "$ref" in node:
            node = definitions[node["$ref"].rpartition("/")[2]]
        elif "anyOf" in node and "discriminator" not in node:
            node = next((option for option in node["anyOf"] if option.get("type") != "null"), {})
        else:
            return node


def _sentence(where: str, config_class: type[RecipeConfig]) -> str:
    """The description of a field, for the message that it is missing."""
    schema: Any = TypeAdapter(config_class).json_schema()
    node: Any = schema
    for part in where.split("."):
        node = _resolve(node, schema.get("$defs", {})).get("properties", {}).get(part.partition("[")[0], {})
    text = node.get("description", "").partition("\n")[0]
    return f"; {text[:1].lower()}{text[1:].rstrip('.')}" if text else ""


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
