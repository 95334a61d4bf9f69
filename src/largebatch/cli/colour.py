"""Colour for a terminal that has it; plain text elsewhere (https://no-color.org)."""

import os
from collections.abc import Callable
from typing import TextIO

CODES = {"good": "32", "bad": "31", "faint": "2"}


def painter(stream: TextIO) -> Callable[[str, str], str]:
    """A function that gives a text the colour of a mark, one of CODES, if the stream shows colours."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return lambda text, _: text
    return lambda text, mark: f"\033[{CODES[mark]}m{text}\033[0m"
