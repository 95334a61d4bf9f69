"""Reading the files that are checked."""

import json
from pathlib import Path

from largebatch.errors import UserError
from largebatch.lint.findings import Finding


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
