"""How the processes of a run end: each writes its own ending, once, and all who ask read the same files.

An ending is a file rank_<rank>.json in the folder `endings/` of the job's start, if LARGEBATCH_LOGS names that, and,
once the run has begun, in the folder of its attempt (see `storage.attempts`). So a start that is refused is known to
its job and writes nothing into a run folder, which may be another's; and a run knows its endings without any job. What
all processes agree on, such as that the run has finished, is written by the first process alone.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from largebatch.system.failures import NOT_RETRYABLE, Kind, describe_error, kind_of
from largebatch.system.regular_file import read_bytes
from largebatch.system.variables import whole_number_or_none

ENDINGS = "endings"
"""The folder of the endings in that of a job's start."""
MAX_MESSAGE_CHARS = 500


class StopReason(StrEnum):
    """Who or what stops a run before its end; of several, the last in this order counts."""

    TIME_LIMIT = "the end of the job's time limit"
    SIGUSR1 = "SIGUSR1"
    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"  # after which the launcher sends SIGTERM
    BATCH_SCRIPT = "the batch script"
    STOP_FILE = "the stop file"  # a person's request, after which the job is not started again


STOP_SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to stop: each is a `StopReason` of its name."""


@dataclass(frozen=True)
class Ending:
    """How one process has ended."""

    kind: Kind
    message: str = ""  # for people
    reason: StopReason | None = None  # why it was stopped
    exception: str | None = None  # the name of the type
    is_consequence: bool = False  # whether it failed only because another process went away
    rank: int | None = None
    node: str = ""
    time: float = 0.0  # by the clock of the node, in seconds since 1970
    step: int = 0  # optimizer steps completed
    trained: bool = False  # whether this start has completed one of them
    micro_batch_size: int | None = None
    file: str = ""  # where to read more

    @property
    def retry(self) -> bool:
        """Whether another start may end otherwise."""
        return self.kind not in NOT_RETRYABLE

    @property
    def where_and_why(self) -> str:
        """The process, its message in one line, and where to read more; the message alone if it was not read."""
        message = " ".join(self.message.split())
        if not self.file:
            return message
        who = self.node if self.rank is None else f"rank {self.rank} on {self.node}"
        # All who wait report a hang, so the rank of one of them would mislead.
        who = "hang" if self.kind == Kind.HANG else who
        return f"{who}: {message[:MAX_MESSAGE_CHARS]} (see {self.file})"


def parse_ending(text: bytes) -> Ending | None:
    """The ending in a JSON text; None if the text is not one."""
    # It takes long to import, and a command's help does not need it.
    from pydantic import TypeAdapter

    with suppress(ValueError):
        return TypeAdapter(Ending).validate_json(text)
    return None


def read_endings(folder: Path) -> list[Ending]:
    """The endings of processes that are in a folder; damaged files are skipped."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError):
            if (ending := parse_ending(read_bytes(path))) is not None:
                found.append(replace(ending, file=str(path)))
    return found


def decisive(endings: Iterable[Ending]) -> Ending | None:
    """The ending that tells how the run has ended: among failures, the first cause; None if there is no ending.

    Clocks of nodes differ, so times only decide between failures of the same rank in this order.
    """
    order = [Kind.REFUSED, Kind.FINISHED, Kind.STOPPED]

    def precedence(ending: Ending) -> tuple[int, float]:
        if ending.kind in order:
            return order.index(ending.kind), ending.time
        # An exception explains what the launcher saw, and a killed process explains lost connections.
        return len(order) + 2 * ending.is_consequence + (ending.kind == Kind.KILLED), ending.time

    return min(endings, key=precedence, default=None)


class OwnEnding:
    """The ending of this process, which is written once: what follows the first is ignored."""

    def __init__(self) -> None:
        self._is_written = False
        self._attempt_folder: Path | None = None
        self._progress: Callable[[], Mapping[str, Any]] = dict
        self._written: Callable[[Ending], None] = lambda _: None

    def begin(self, folder: Path, progress: Callable[[], Mapping[str, Any]], written: Callable[[Ending], None]) -> None:
        """From now on, this process takes part in an attempt of a run.

        Args:
            folder: The folder of the attempt's endings.
            progress: Returns the fields of an ending that say how far the run is.
            written: Called with the ending, after it was written or could not be.
        """
        self._attempt_folder = folder
        self._progress = progress
        self._written = written

    def write(self, kind: Kind, message: str, **about: Any) -> None:
        """Write the ending, with further fields; OSError if the run's folder does not take it."""
        if self._is_written:
            return
        # Names of files may have lone surrogates, which are not JSON.
        message = message.encode(errors="replace").decode()
        place: dict[str, Any] = {"rank": whole_number_or_none("RANK") or 0, "node": node_name(), "time": time.time()}
        ending = Ending(kind, message, **(place | dict(self._progress()) | about))
        try:
            # The attempt's folder comes first, because only writing there may raise an error: then neither folder has
            # this ending. If the run was moved, the folder is gone, and it is not created again.
            if self._attempt_folder is not None:
                _write_new(self._attempt_folder, ending)
            if logs := os.environ.get("LARGEBATCH_LOGS"):
                with suppress(OSError):
                    Path(logs, ENDINGS).mkdir(parents=True, exist_ok=True)
                    _write_new(Path(logs, ENDINGS), ending)
            self._is_written = True
        finally:
            self._written(ending)

    def fail(self, error: BaseException) -> None:
        """Write, as far as possible, that the process ends by an exception."""
        kind = kind_of(error)
        # Torch raises a RuntimeError when a collective fails, usually because another process went away. A connection
        # of the task's own, such as a download, raises an OSError.
        is_consequence = kind == Kind.COMMUNICATION and isinstance(error, RuntimeError)
        with suppress(OSError):
            exception = type(error).__name__
            self.write(kind, describe_error(error), exception=exception, is_consequence=is_consequence)

    def hang(self, message: str) -> None:
        """Write, as far as possible, that the process hangs, or waits for one that does."""
        with suppress(OSError):
            self.write(Kind.HANG, message)


def _write_new(folder: Path, ending: Ending) -> None:
    """Write an ending into a folder that has none of this rank; nothing is left if that fails."""
    path = folder / f"rank_{ending.rank}.json"
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(asdict(ending), file, indent=2)
    except FileExistsError:
        return
    except OSError:
        path.unlink(missing_ok=True)
        raise


def node_name() -> str:
    """This node, as the cluster calls it."""
    return os.environ.get("LARGEBATCH_NODE") or socket.gethostname()
