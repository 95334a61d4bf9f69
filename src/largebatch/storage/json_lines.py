"""Files of JSON lines, whose last line may have been cut short. Needs no torch."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that can be read."""
    texts = path.read_bytes().split(b"\n") if path.exists() else []
    return [line for line in map(parse_line, texts) if line is not None]


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The object in a line; None if it is not a line of a journal."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step", 0), int | float) else None
