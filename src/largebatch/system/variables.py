"""Whole numbers in environment variables, which launchers, schedulers and people set."""

import os
import re
from collections.abc import Mapping

from largebatch.errors import LaunchError


def whole_number(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number in a variable of the given environment, or this process's; `default` if it is not set or empty.

    Raises:
        LaunchError: It is something else, or has more than 18 digits.
    """
    if not environment.get(name):
        return default
    number = whole_number_or_none(name, environment)
    if number is None:
        given = f"{environment[name]:.40}"
        raise LaunchError(f"{name} is {given!r}, not a whole number of at most 18 digits; write one, or unset it")
    return number


def whole_number_or_none(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """As `whole_number`, but None if there is none."""
    text = environment.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
