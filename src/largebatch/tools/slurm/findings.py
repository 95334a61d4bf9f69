"""Findings, and the text and lines that they are about."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from largebatch.errors import UserError

COMMAND_LINE = "the command line"


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a file."""

    file: str  # the file, as it was named, or "the command line"
    line: int  # the line in it, from 1; 0 if there is none
    rule: str  # the rule's name
    why: str  # what was found, and why it is wrong
    remedy: str  # what to write instead

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.why}; {self.remedy} [{self.rule}]"


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}; run largebatch from the top of the repository") from None


def line_of(text: str, key: str) -> int:
    """The line of a key such as `learning_rate.decay.at[0]` in JSON or YAML, or of the nearest key above it; else 1."""
    try:
        # JSON is YAML, except that YAML allows no tabs between words.
        lines = dict(_lines_of_keys(yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader), ""))
    except yaml.YAMLError:
        return 1
    while key:
        # Some problems name only the last part of a key.
        names = [name for name in lines if name.endswith(f".{key}")]
        if names:
            return lines[min(names, key=len)]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return 1


def _lines_of_keys(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{path}.{key.value}", key.start_mark.line + 1
            yield from _lines_of_keys(value, f"{path}.{key.value}")
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{path}[{number}]", value.start_mark.line + 1
            yield from _lines_of_keys(value, f"{path}[{number}]")
