"""Options that several commands have, and types of values."""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

from largebatch.task_folders import recipes_in
from largebatch.words import did_you_mean

RECIPES = Path("recipes")  # the folder of the tasks' folders, from the top of a project
MAX_AMOUNT = 10**15  # of anything that is counted or measured, so that products of several stay finite
MAX_LISTED = 100


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, as `config`, its `task`, and overrides of its fields: words `--section.field VALUE`."""
    add_recipe_file(parser)
    add_task(parser)
    parser.set_defaults(takes_overrides=True)


def add_recipe_file(parser: argparse.ArgumentParser) -> None:
    """Add the recipe alone, as `config`."""
    parser.add_argument(
        "config",
        metavar="RECIPE",
        type=recipe_file,
        help="the recipe's JSON file or, at the top of a project, its name; the config.py of its task is run",
    )


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the task, as `task`; None means that the recipe says it by its place or its `"$schema"`."""
    parser.add_argument(
        "--task",
        type=Path,
        metavar="DIR",
        help='the folder of the task, for a recipe elsewhere; default: the folder of its "$schema"',
    )


def add_options_of_a_run(parser: argparse.ArgumentParser) -> None:
    """Accept and ignore the options of a run, so that its command line can be reused unchanged."""
    for name in ("--run-dir", "--resume", "--allow-change"):
        parser.add_argument(name, help=argparse.SUPPRESS)


def recipe_file(text: str) -> Path:
    """Return the file of a recipe, which is given by its path or, at the top of a project, by its name."""
    found = {file.stem: file for file in recipes_in(RECIPES)}
    path = found.get(text, Path(text))
    if not path.suffix and not path.exists():
        known = ", ".join(sorted(found)) or f"none in {Path.cwd()}; `largebatch new FOLDER --recipe NAME` copies one"
        raise argparse.ArgumentTypeError(
            f"{text}: no such recipe{did_you_mean(text, found)}; give a recipe's JSON file or its name, before any "
            f"overrides; known: {known}"
        )
    return path


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    with suppress(ValueError):
        if 1 <= int(text) <= MAX_AMOUNT:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive whole number up to {MAX_AMOUNT:,}")


def words(text: str) -> list[str]:
    """Return the words between commas; an empty list is refused."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("the list is empty; separate with commas")
    return found


def positive_ints(text: str) -> list[int]:
    """Return the positive whole numbers between commas, at most `MAX_LISTED`."""
    found = words(text)
    if len(found) > MAX_LISTED:
        raise argparse.ArgumentTypeError(f"the list has {len(found):,} numbers; write at most {MAX_LISTED}")
    return [positive_int(word) for word in found]


def positive_float(text: str) -> float:
    """Return an amount."""
    with suppress(ValueError):
        if is_amount(float(text)):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number up to {MAX_AMOUNT:,}")


def is_amount(value: object) -> TypeGuard[float]:
    """Whether it is a positive number with which one can calculate."""
    return isinstance(value, int | float) and 1 / MAX_AMOUNT <= value <= MAX_AMOUNT
