"""Files of JSON lines that a run appends to, and that survive a full disk, a crash, and an attempt that is not over."""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.run.attempt import Attempt
from largebatch.storage.files import replace_file
from largebatch.storage.json_lines import parse_line

MOST_PENDING_LINES = 100_000


class Journal:
    """One file of JSON lines, written by the main process of the current attempt only.

    Args:
        path: The file.
        attempt: The attempt that writes; it is looked at before each writing.
        warn: Tells a person that lines could not be written.
        most_seconds: How long lines may wait for the next one, to be written together.
    """

    def __init__(self, path: Path, attempt: Attempt, warn: Callable[[str], None], most_seconds: float = 0.0):
        self._path = path
        self._attempt = attempt
        self._warn = warn
        self._most_seconds = most_seconds
        self._flushed = -math.inf
        self._pending: list[str] = []
        self._has_warned = False

    def append(self, value: dict[str, Any]) -> None:
        """Add a line. What the file system does not take is kept, and written with later lines.

        Raises:
            TrainingFailed: A later attempt has begun.
        """
        self._pending.append(json.dumps(value) + "\n")
        if time.monotonic() - self._flushed >= self._most_seconds:
            self.flush()

    def flush(self) -> None:
        """Try to write what is kept.

        Raises:
            TrainingFailed: A later attempt has begun.
        """
        if not self._pending:
            return
        self._flushed = time.monotonic()
        size = None
        try:
            self._attempt.check()
            size = self._path.stat().st_size if self._path.exists() else 0
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(self._pending))
        except OSError as error:
            if size is not None and self._path.exists():
                # A part of a line may have been taken.
                with suppress(OSError), self._path.open("r+b") as file:
                    file.truncate(size)
            if not self._has_warned:
                self._warn(f"WARNING: {self._path} cannot be written: {error}; its lines are kept in memory meanwhile")
            self._has_warned = True
            del self._pending[:-MOST_PENDING_LINES]
            return
        self._pending.clear()
        self._has_warned = False

    def keep_until(self, step: float) -> dict[str, Any] | None:
        """Leave out lines of steps after `step`, which training will come to again, and a last line cut short.

        Other lines that cannot be read stay as they are.

        Returns:
            The last readable line that stays.
        """
        if not self._path.exists():
            return None
        kept: list[bytes] = []
        last: dict[str, Any] | None = None
        lines = self._path.read_bytes().split(b"\n")
        for number, text in enumerate(lines):
            line = parse_line(text)
            if line is None and number == len(lines) - 1:
                continue
            if line is None:
                self._warn(f"WARNING: line {number + 1} of {self._path} cannot be read; it is left as it is")
            elif line.get("step", 0) > step:
                continue
            else:
                last = line
            kept.append(text + b"\n")
        replace_file(self._path, [memoryview(b"".join(kept))])
        return last
