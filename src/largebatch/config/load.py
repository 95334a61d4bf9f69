"""Reads a recipe: JSON plus overrides, validated as a whole: every problem of the sections, then those between them."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from largebatch.config.differences import differences, is_within
from largebatch.config.problems import JsonObject, explained
from largebatch.config.recipe import RecipeConfig, as_json
from largebatch.config.task_config import config_class_of, task_code_errors
from largebatch.errors import ConfigError
from largebatch.system.regular_file import read_bytes
from largebatch.words import did_you_mean

MAX_PROBLEMS = 100
WHERE_DATA_IS = ("data.path", "data.data_files", "data.train", "data.eval")


def load_config(path: str | Path, overrides: Sequence[str] = (), task: Path | None = None) -> RecipeConfig:
    """Read and validate a recipe, as the `Config` of its task's `config.py`.

    Args:
        path: The recipe's JSON file.
        overrides: Command-line words such as `["--batch.global_batch_size", "512", "--seed=1"]`. Values are JSON; a
            value that is not JSON is a string.
        task: The folder of the task that the caller can run; None means the one that `task_of` finds.

    Raises:
        ConfigError: All problems of the file and the overrides, one line each; or `config.py` cannot be used.
    """
    config = load_sections(path, overrides, task)
    check_together(config, path)
    return config


def load_sections(path: str | Path, overrides: Sequence[str], task: Path | None) -> RecipeConfig:
    """As `load_config`, of a recipe whose sections need not fit together."""
    path = Path(path)
    raw = _read_json(path)
    given = split_overrides(overrides)
    _apply(given, raw)
    found = config_class_of(task_of(path, task), path)
    fields = {field.alias or name for name, field in found.model_fields.items()}
    sections = {name: name.partition(".")[0] for name, _ in given}
    unknown = [
        f"--{name}: neither an option here nor a field of the recipe{did_you_mean(section, fields)}"
        for name, section in sections.items()
        if section not in fields
    ]
    if unknown:
        raise ConfigError(unknown, "the command line")
    config = _validate_sections(raw, found, path)
    if overrides and config.expected:
        config = _without_figure_of_others(config, _validate_sections(_read_json(path), found, path))
    return config


def _without_figure_of_others(config: RecipeConfig, published: RecipeConfig) -> RecipeConfig:
    """The config, which expects the figure of the published one only if it trains and evaluates in the same way."""
    free = (*WHERE_DATA_IS, "seed")
    trains_alike = all(is_within(name, free) for name in differences(as_json(published), config))
    evaluates_alike = config.evaluation.max_samples == published.evaluation.max_samples
    if (trains_alike and evaluates_alike) or config.expected != published.expected:
        return config
    return config.model_copy(update={"expected": None})


def task_of(recipe: Path, named: Path | None = None) -> Path:
    """The folder of a recipe's task: its own folder, if that has a `config.py`; or else the one that was named, such as
    that of the train.py that runs; or else that of its `"$schema"`, whose path is relative to the recipe.

    Raises:
        ConfigError: The recipe is in the folder of a different task than the one that was named, or cannot be read.
    """
    own = recipe.parent
    if not (own / "config.py").is_file():
        return named or (own / str(_read_json(recipe).get("$schema"))).parent
    if named and not (named.is_dir() and own.samefile(named)):
        raise ConfigError(f"belongs to a different task than {named}; run {own / 'train.py'} instead", recipe)
    return own


def validate(raw: JsonObject, config_class: type[RecipeConfig]) -> RecipeConfig:
    """Validate the parsed JSON of a recipe.

    Raises:
        ConfigError: All problems within sections, one line each; or, if there are none, all between them.
    """
    config = _validate_sections(raw, config_class, None)
    check_together(config, None)
    return config


def _validate_sections(raw: JsonObject, config_class: type[RecipeConfig], source: Path | None) -> RecipeConfig:
    with task_code_errors(config_class.task_folder()):
        try:
            # As JSON, where lists may stand for tuples, and strings for paths and dates, although validation is strict.
            return config_class.model_validate_json(json.dumps(raw))
        except ValidationError as error:
            explanations = islice(explained(error, config_class.model_json_schema()), MAX_PROBLEMS)
            problems = [f"{where or 'the whole file'}: {what}" for where, what in explanations]
            if (more := error.error_count() - MAX_PROBLEMS) > 0:
                problems.append(f"the whole file: {more:,} more problems, which are not shown")
            raise ConfigError(problems, source) from None


def check_together(config: RecipeConfig, source: str | Path | None) -> None:
    """Raise ConfigError with all problems between sections, one line each; `source` is named in it."""
    with task_code_errors(config.task_folder()):
        problems = list(_inconsistencies(config))
    if problems:
        raise ConfigError(problems, source)


def _inconsistencies(config: RecipeConfig) -> Iterator[str]:
    for check in type(config).checks():
        found = check(config)
        if not isinstance(found, Iterator):
            raise ConfigError(
                f"{inspect.getsourcefile(check)}: {check.__qualname__} returned {found!r}; a check must yield its "
                "problems"
            )
        yield from found


def _read_json(path: Path) -> JsonObject:
    def refuse_duplicates(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
        result: JsonObject = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"{key} is given twice in the same object; keep one")
            result[key] = value
        return result

    try:
        raw = json.loads(read_bytes(path, follow_links=True).decode(), object_pairs_hook=refuse_duplicates)
    except FileNotFoundError:
        problem = "no such file; give the path of a recipe's JSON, before any overrides"
    # Not only files and JSON: text that is not UTF-8, integers with thousands of digits, endless nesting.
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read as JSON: {error}"
    else:
        if isinstance(raw, dict):
            return raw
        problem = "must be a JSON object, { … }"
    raise ConfigError(problem, path)


def split_overrides(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """The dotted name and the text of each override.

    Raises:
        ConfigError: A word is not an override, or has no value.
    """
    words = iter(overrides)
    found: list[tuple[str, str]] = []
    problems: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if not name.startswith("--") or not name[2:]:
            problems.append(f"{word}: not an option; overrides are written --section.field value")
        elif (value := text if equals else next(words, None)) is None:
            problems.append(f"{name}: has no value; write {name} VALUE")
        else:
            found.append((name[2:], value))
    if problems:
        raise ConfigError(problems, "the command line")
    return found


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """The overrides without those that a later one replaces."""
    fields = split_overrides(overrides)
    return [
        f"--{name}={value}"
        for number, (name, value) in enumerate(fields, 1)
        if not any(is_within(name, [later]) for later, _ in fields[number:])
    ]


def override_words(values: Mapping[str, Any]) -> list[str]:
    """Overrides that give fields, by dotted name, these values."""
    return [f"--{name}={json.dumps(value)}" for name, value in values.items()]


def _apply(overrides: Sequence[tuple[str, str]], raw: JsonObject) -> None:
    for name, value in overrides:
        *sections, field = name.split(".")
        target = raw
        for section in sections:
            # null and absent sections become objects: `--learning_rate.warmup.start zero` where warmup is null.
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        try:
            target[field] = json.loads(value)
        except (ValueError, RecursionError):
            target[field] = value
