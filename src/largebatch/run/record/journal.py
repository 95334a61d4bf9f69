"""Files of JSON lines in a run's folder."""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from largebatch.storage.attempts import Attempt
from largebatch.storage.files import Line, parse_line, replace_file
from largebatch.system.presence import exists

MAX_PENDING_LINES = 100_000


@dataclass
class Journal:
    """One file of JSON lines, which survives a full disk, a crash, and an earlier attempt that is still running."""

    path: Path
    attempt: Attempt  # the attempt that writes, checked before each write
    warn: Callable[[str], None]  # called with a warning for the user
    max_seconds: float = 0.0  # how long lines may wait for the next ones, to be written together

    def __post_init__(self) -> None:
        self._flushed = -math.inf
        self._pending: list[str] = []
        self._has_warned = False

    def append(self, value: Line) -> None:
        """Add a line; one that the file system refuses is written with later lines. Fails as `flush` does."""
        self._pending.append(json.dumps(value) + "\n")
        if time.monotonic() - self._flushed >= self.max_seconds:
            self.flush()

    def flush(self) -> None:
        """Try to write the lines that wait; TrainingFailed if a later attempt has begun."""
        if not self._pending:
            return
        self._flushed = time.monotonic()
        size = None
        try:
            self.attempt.check()
            size = self.path.stat().st_size if exists(self.path) else 0
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self._pending))
        except OSError as error:
            if size is not None:
                # Part of a line may have been written.
                with suppress(OSError):
                    os.truncate(self.path, size)
            if not self._has_warned:
                self.warn(f"WARNING: {self.path} cannot be written: {error}; its lines are kept in memory until it can")
            self._has_warned = True
            del self._pending[:-MAX_PENDING_LINES]
            return
        self._pending.clear()
        self._has_warned = False

    def keep_until(self, step: float) -> Line:
        """Remove lines of steps after `step`, which training will repeat, and a last line that was cut short.

        Returns the latest value of each name in the lines that are left. Other lines that cannot be read stay.
        """
        last: Line = {}
        if not exists(self.path):
            return last
        kept: list[bytes] = []
        lines = self.path.read_bytes().split(b"\n")
        for number, text in enumerate(lines, 1):
            line = parse_line(text)
            if line is None and number < len(lines):
                self.warn(f"WARNING: line {number} of {self.path} cannot be read; it is left as it is")
                kept.append(text + b"\n")
            elif line is not None and line.get("step", 0) <= step:
                kept.append(text + b"\n")
                last |= line
        replace_file(self.path, b"".join(kept))
        return last
