"""The class `Config` of a task's folder, and the reporting of errors in the folder's own code."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import get_args

from largebatch.config.data import Data
from largebatch.config.models import Model
from largebatch.config.recipe import RecipeConfig
from largebatch.errors import ConfigError, UserError
from largebatch.task_folders import SCHEMA, import_from


def config_class_of(folder: Path, recipe: Path | None = None) -> type[RecipeConfig]:
    """The class `Config` of a task folder's `config.py`.

    Args:
        folder: The folder of the task.
        recipe: The recipe in it that is being read, for messages.

    Raises:
        ConfigError: There is no `config.py`, it cannot be imported, or it has no such class.
    """
    file = folder / "config.py"
    if not file.is_file():
        raise ConfigError(
            f"there is no {file}, which defines a recipe's fields; move its JSON into the folder of its task, write "
            f'"$schema": "TASK/{SCHEMA}" into it, the path of that folder from the JSON\'s, or give --task TASK',
            recipe,
        )
    with task_code_errors(folder, file.name):
        module = import_from(folder, "config")
        found = getattr(module, "Config", None)
        # One that is imported would be that of another task.
        if not (isinstance(found, type) and issubclass(found, RecipeConfig) and found.__module__ == module.__name__):
            raise ConfigError(
                f"{file}: has no class Config(RecipeConfig) of its own; "
                "write one in this file, as docs/tasks.md describes"
            )
        # Raises an error if an annotation names something that is not defined.
        found.model_rebuild()
    # A task replaces these sections, but plans need what the base classes declare.
    for name, base in (("data", Data), ("model", Model)):
        annotation = found.model_fields[name].annotation
        for each in get_args(annotation) or (annotation,):
            if not (isinstance(each, type) and issubclass(each, base)) or each is base:
                shown = getattr(each, "__name__", each)
                raise ConfigError(
                    f"{file}: {name} is {shown}; "
                    f"write a subclass of {base.__module__}.{base.__name__}, or a union of subclasses"
                )
    return found


@contextmanager
def task_code_errors(folder: Path, blamed: str | None = None) -> Iterator[None]:
    """Send what a task's files print to stderr, and turn what they raise into a ConfigError with file and line.

    Args:
        folder: The folder of the task.
        blamed: File to name in errors whose traceback has no line in the folder; None leaves those unchanged.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except UserError as error:
        raise ConfigError(str(error)) from error
    except (Exception, SystemExit) as error:
        place = _place_in(folder, error) or (folder / blamed if blamed else None)
        if place is None:
            raise
        text = error.msg if isinstance(error, SyntaxError) else str(error).partition("\n\nFor further information")[0]
        described = f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": ")
        if isinstance(error, SystemExit):
            described += '; move what only a run does below if __name__ == "__main__":'
        raise ConfigError(f"{place}: {described}") from error


def _place_in(folder: Path, error: BaseException) -> str | None:
    """The last file and line in a folder that an error went through."""
    top = folder.resolve()
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    inside = [(Path(file), line) for file, line in places if Path(file).is_relative_to(top)]
    return f"{folder / inside[-1][0].relative_to(top)}:{inside[-1][1]}" if inside else None
