"""What a rule has to say, and reading the files that are checked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from largebatch.errors import UserError

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Finding:
    """A mistake in a file."""

    file: str  # the file, as it was named; or "the command line"
    line: int  # the line in it, from 1; 0 on the command line
    rule: str  # the rule's name
    why: str  # what was found, and why it is wrong
    remedy: str  # what to write instead

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.why}; {self.remedy} [{self.rule}]"


def read_text(path: Path) -> str:
    """The text of a file, with its line ends as they are.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run largebatch from the top of the repository") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def read_json(path: Path) -> tuple[str, object] | Finding:
    """The text of a JSON file and what it says; or what is wrong with it.

    Raises:
        UserError: It cannot be read.
    """
    text = read_text(path)
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        line, problem = error.lineno, error.msg
    # Integers of thousands of digits, nesting without end.
    except (ValueError, RecursionError) as error:
        line, problem = 1, str(error)
    return Finding(str(path), line, "json-syntax", f"not valid JSON: {problem}", "correct it here or just before")


class KeyLines:
    """The lines of the keys of a JSON or YAML text; JSON is read as YAML, which knows its lines."""

    def __init__(self, text: str):
        self._text = text

    @cached_property
    def _lines(self) -> dict[str, int]:
        # Read when first asked for: most files have nothing to be told of.
        try:
            # YAML allows no tabs between words, JSON does.
            return dict(_walk(yaml.compose(self._text.replace("\t", " "), Loader=yaml.SafeLoader), ""))
        # What is no YAML, or is nested without end, is found elsewhere; its lines are not known.
        except (yaml.YAMLError, RecursionError):
            return {}

    def of(self, path: str) -> int:
        """The line of a key such as `learning_rate.decay.at[0]`, or of what is nearest above it; 1 where nothing is."""
        while path:
            if path in self._lines:
                return self._lines[path]
            anywhere = [line for name, line in self._lines.items() if name.endswith(f".{path}")]
            if anywhere:
                return anywhere[-1]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return 1


def _walk(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            yield inner, key.start_mark.line + 1
            yield from _walk(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{path}[{number}]", value.start_mark.line + 1
            yield from _walk(value, f"{path}[{number}]")
