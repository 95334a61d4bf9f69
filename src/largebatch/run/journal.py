"""Files of JSON lines that a run appends to, and that survive a full disk, a crash, and an attempt that is not over."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.run.attempt import Attempt
from largebatch.storage.files import replace_file

MOST_PENDING_LINES = 100_000


class Journal:
    """One file of JSON lines, written by the main process of the current attempt only.

    Args:
        path: The file.
        attempt: The attempt that writes; it is looked at before each line.
        warn: Tells a person that lines could not be written.
    """

    def __init__(self, path: Path, attempt: Attempt, warn: Callable[[str], None]):
        self._path = path
        self._attempt = attempt
        self._warn = warn
        self._pending: list[str] = []
        self._has_warned = False

    def append(self, value: dict[str, Any]) -> None:
        """Add a line. What the file system does not take is kept, and written with the next line.

        Raises:
            TrainingFailed: A later attempt has begun.
        """
        self._pending.append(json.dumps(value) + "\n")
        self.flush()

    def flush(self) -> None:
        """Try to write what is kept.

        Raises:
            TrainingFailed: A later attempt has begun.
        """
        if not self._pending:
            return
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

        Returns:
            The last line that stays.
        """
        lines = [line for line in read_json_lines(self._path) if line.get("step", 0) <= step]
        if self._path.exists():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            replace_file(self._path, [memoryview(text.encode())])
        return lines[-1] if lines else None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, up to the first that is not whole."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines
