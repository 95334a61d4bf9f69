"""Kinds of failures, by which `largebatch job-ended` decides whether the same start would fail again. Needs no torch.

A failed process of a job leaves what went wrong in errors/rank_<rank>.json in the folder of the job's start:

    {"rank": …, "node": …, "time": …, "kind": …, "exception": the name of its type or null,
     "message": …, "consequence": true | false}

`largebatch.tools.job.cause` finds the first cause of a failed start in these files.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from largebatch.errors import StorageError, TrainingFailed, UserError, reason_of
from largebatch.system.variables import whole_number_or_none

Kind = Literal[
    "import", "configuration", "model", "training", "out_of_memory", "communication", "files", "hang", "error"
]

HOPELESS = ("import", "configuration", "model", "training")  # the same start would fail in the same way
ERRORS = "errors"  # the folder with the errors of a start's processes, in the folder of the start
BUILDING_THE_MODEL = "note: raised while the recipe was building its model"

# Class names in place of the classes, which belong to torch and others.
_OF_CLASSES: dict[str, Kind] = {
    "OutOfMemoryError": "out_of_memory",
    "DistError": "communication",
    "ConnectionError": "communication",
    "TimeoutError": "communication",
    "HTTPError": "communication",
    "ImportError": "import",
    "OSError": "files",
}
_OUT_OF_MEMORY = re.compile("CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_NO_MEMORY = re.compile("can't allocate memory|Storage size calculation overflowed")  # the host's
# What libraries written in Rust say of the file system, such as safetensors.
_FILES = re.compile(r"Os \{ code: \d+|\(os error \d+\)|IoError")
# What torch, gloo and NCCL say, mostly in the processes that remain after another one went away.
_COMMUNICATION = re.compile(
    "nccl|gloo|process group|connection (closed|reset|refused)|closed by peer|reset by peer|broken pipe|timed out"
    "|socket timeout|remote process exited|recv, got 0 bytes|connectFullMesh failed|pair closure",
    re.IGNORECASE,
)


def kind_of(error: BaseException) -> Kind:
    """The kind of an exception, by its type, message and causes."""
    if isinstance(error, UserError):
        # An error of another process has its exit code, but not its class.
        kinds: dict[int, Kind] = {StorageError.exit_code: "files", TrainingFailed.exit_code: "training"}
        return kinds.get(error.exit_code, "configuration")
    cause: BaseException | None = error
    while cause is not None:
        names = {parent.__name__ for parent in type(cause).__mro__}
        for name, kind in _OF_CLASSES.items():
            if name in names:
                return kind
        if isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause)):
            return "out_of_memory"
        if isinstance(cause, RuntimeError) and _COMMUNICATION.search(str(cause)):
            return "communication"
        if _FILES.search(str(cause)):
            return "files"
        cause = cause.__cause__
    return "model" if BUILDING_THE_MODEL in getattr(error, "__notes__", ()) else "error"


@contextmanager
def building_the_model() -> Iterator[None]:
    """Note on an exception that it was raised while the recipe was building its model."""
    try:
        yield
    except Exception as error:
        if _NO_MEMORY.search(str(error)):
            raise UserError(
                f"model: it does not fit this machine's memory ({reason_of(error)}); write smaller sizes"
            ) from error
        error.add_note(BUILDING_THE_MODEL)
        raise


def in_words(error: BaseException) -> str:
    """The message of an exception and, unless it is a user error, its type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@contextmanager
def storage_errors() -> Iterator[None]:
    """Raise errors of the file system as StorageError; a file that is missing is a bug, and keeps its traceback."""
    try:
        yield
    except Exception as error:
        if kind_of(error) != "files" or isinstance(error, UserError | FileNotFoundError):
            raise
        raise StorageError(f"{in_words(error)}; the same command tries again") from error


def node_name() -> str:
    """This node, as the cluster calls it."""
    return os.environ.get("LARGEBATCH_NODE") or socket.gethostname()


def keep_exception(error: BaseException) -> None:
    """Record an exception of this process in the folder of the job's start, if there is one."""
    kind = kind_of(error)
    # Torch raises a RuntimeError when a collective fails, usually because another process went away. A connection of
    # the task's own, such as a download, raises an OSError.
    consequence = kind == "communication" and isinstance(error, RuntimeError)
    keep_error(in_words(error), kind, type(error).__name__, consequence)


def keep_error(message: str, kind: Kind, exception: str | None = None, consequence: bool = False) -> None:
    """Record an error of this process in the folder of the job's start, if there is one; the first error stays."""
    logs = os.environ.get("LARGEBATCH_LOGS")
    if not logs:
        return
    rank = whole_number_or_none("RANK") or 0
    value = {
        "rank": rank,
        "node": node_name(),
        "time": time.time(),
        "kind": kind,
        "exception": exception,
        "message": message,
        "consequence": consequence,
    }
    # The file must not hide the error.
    with suppress(OSError):
        folder = Path(logs, ERRORS)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank_{rank}.json").open("x", encoding="utf-8") as file:
            json.dump(value, file)
