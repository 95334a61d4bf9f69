"""Shared by all commands: how a command is declared, common options, and types of values."""

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from largebatch.errors import ConfigError, did_you_mean
from largebatch.task_folders import recipes_in

if TYPE_CHECKING:
    from largebatch.config import RecipeConfig
    from largebatch.plan import RunPlan

WIDTH = 100
RECIPES = Path("recipes")  # the folder of the tasks' folders, from the top of a project
EXIT_CODES = "Exit codes: 0 done, 1 a check failed, 2 the input cannot be used."

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    epilog: str,
    takes_overrides: bool = False,
) -> argparse.ArgumentParser:
    """Declare a command and return its parser, for its own options.

    `run` takes the parsed options and returns the exit code; `options.refuse(message)` ends the program as a parse
    error does. `epilog` has examples, which are shown as they are. A command that takes overrides gets
    `--section.field VALUE` as `options.overrides`; others refuse unknown options.
    """
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, WIDTH),
        epilog=f"{epilog}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, refuse=parser.error, takes_overrides=takes_overrides)
    return parser


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, as `config`."""
    help = "the recipe's JSON file or, at the top of a project, its name; the config.py next to it is run"
    parser.add_argument("config", metavar="RECIPE", type=recipe_file, help=help)


def add_accelerate_configs(parser: argparse.ArgumentParser) -> None:
    """Add the folder of Accelerate configs, as `accelerate_configs`; None means that of the recipe's project."""
    parser.add_argument(
        "--accelerate-configs",
        type=Path,
        help="folder of the strategies' YAML files; default: accelerate_configs next to the recipe's folder",
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
        known = ", ".join(sorted(found)) or f"none in {Path.cwd()}"
        raise argparse.ArgumentTypeError(
            f"{text}: no such recipe{did_you_mean(text, found)}; give a recipe's JSON file or its name, before any "
            f"overrides; known: {known}"
        )
    return path


def words(text: str) -> list[str]:
    """Return the words between commas; an empty list is refused."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("the list is empty; separate with commas")
    return found


def whole_number(text: str) -> int:
    """Return a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write 0 or more")
    return int(text)


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")


def positive_ints(text: str) -> list[int]:
    """Return the positive whole numbers between commas."""
    return [positive_int(word) for word in words(text)]


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def memory(text: str) -> int:
    """Return the bytes of a number of GiB, or of a number with its unit."""
    number, unit = text.strip(), 2**30
    for name, size in (("GIB", 2**30), ("GB", 10**9), ("G", 2**30)):
        if number.upper().endswith(name):
            number, unit = number[: -len(name)], size
            break
    size_in_bytes = positive_float(number) * unit
    if size_in_bytes == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; write it in GiB, such as 80")
    return round(size_in_bytes)


def first_plan(
    config: "RecipeConfig", world_sizes: Sequence[int], micro_batch_sizes: Sequence[int | None] = (None,)
) -> "RunPlan":
    """The first plan of these numbers of processes and micro-batch sizes, where None means the recipe's own.

    Raises:
        ConfigError: The batch divides over none of them.
    """
    from largebatch.plan import resolve

    problems: list[str] = []
    for world_size in world_sizes:
        for micro_batch_size in micro_batch_sizes:
            try:
                return resolve(config, world_size, micro_batch_size)
            except ConfigError as error:
                problems += [f"--world-sizes {world_size}: {problem}" for problem in error.problems]
    raise ConfigError(list(dict.fromkeys(problems)))
