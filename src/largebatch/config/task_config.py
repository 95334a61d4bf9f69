"""The class `Config` of a task's folder, and errors of its `config.py`, which is its author's program."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from largebatch.config.data import Data
from largebatch.config.models import Model
from largebatch.config.recipe import RecipeConfig
from largebatch.errors import ConfigError, UserError
from largebatch.task_folders import import_from


def config_class_of(folder: Path, recipe: str | Path | None = None) -> type[RecipeConfig]:
    """The class `Config` of a task folder's `config.py`.

    Args:
        folder: The task's.
        recipe: The file in it that is read, for messages.

    Raises:
        ConfigError: There is no `config.py`, it cannot be imported, or it has no such class.
    """
    file = folder / "config.py"
    if not file.is_file():
        raise ConfigError(
            [
                f"there is no {file}, which says what a recipe may say; a recipe's JSON lies in the folder of its "
                "task, beside config.py, data.py, model.py and train.py"
            ],
            str(recipe) if recipe else None,
        )
    with authors_program(folder):
        module = import_from(folder, "config")
        found = getattr(module, "Config", None)
        if not (isinstance(found, type) and issubclass(found, RecipeConfig)):
            raise ConfigError([f"{file}: has no class Config(RecipeConfig); write one, as docs/tasks.md says"])
        if found.__module__ != module.__name__:
            raise ConfigError([f"{file}: its Config is that of {found.__module__}; write class Config(…) here"])
        found = found.with_optimizers()
        _require_sections(found, file)
    return found


def _require_sections(config_class: type[RecipeConfig], file: Path) -> None:
    """What a task puts in place of `data` and `model` must say what plans need to know of any."""
    for name, base in (("data", Data), ("model", Model)):
        annotation = config_class.model_fields[name].annotation
        for each in get_args(annotation) or (annotation,):
            if not (isinstance(each, type) and issubclass(each, base)) or each is base:
                raise ConfigError(
                    [
                        f"{file}: {name} is {getattr(each, '__name__', each)}; write a subclass of "
                        f"{base.__module__}.{base.__name__}, or a union of such"
                    ]
                )


@contextmanager
def authors_program(folder: Path | None) -> Iterator[None]:
    """What a task's config.py prints is not part of the output, and what it raises is told with file and line.

    Errors that do not come from the folder are left as they are; all of them if there is none.
    """
    if folder is None:
        yield
        return
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (UserError, ValidationError) as error:
        place = _place_in(folder, error)
        if isinstance(error, ConfigError) or place is None:
            raise
        raise ConfigError([f"{place}: {_described(error)}"]) from error
    except (Exception, SystemExit) as error:
        place = _place_in(folder, error)
        if place is None and type(error).__module__.partition(".")[0] != "pydantic":
            raise
        raise ConfigError([f"{place or folder / 'config.py'}: {_described(error)}"]) from error


def _place_in(folder: Path, error: BaseException) -> str | None:
    """File and line in a folder where an error comes from: the last that it went through."""
    top = folder.resolve()
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    inside = [(Path(file), line) for file, line in places if Path(file).is_relative_to(top)]
    return f"{folder / inside[-1][0].relative_to(top)}:{inside[-1][1]}" if inside else None


def _described(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error).partition("\n\nFor further information")[0]
    return f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": ")
