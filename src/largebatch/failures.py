"""Kinds of failures, by which `largebatch job-ended` decides whether the same start would fail again. Needs no torch.

A failure is described by a message, a kind, and the name of the exception's type. It is published in status.json or, as
long as the run folder is not the run's yet, in a file in the folder of the job's start.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

Kind = Literal[
    "import", "configuration", "model", "training", "out_of_memory", "communication", "files", "hang", "error"
]

HOPELESS = ("import", "configuration", "model", "training")
"""The same start would fail in the same way."""
FAILURE = "failure.json"
"""The file in the folder of a job's start."""
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
_COMMUNICATION = re.compile("nccl|gloo|process group|connection (closed|reset|refused)|timed out", re.IGNORECASE)


def kind_of(error: BaseException) -> Kind:
    """The kind of an exception that no user error describes, by its type, message and causes."""
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
        cause = cause.__cause__
    return "model" if BUILDING_THE_MODEL in getattr(error, "__notes__", ()) else "error"


@contextmanager
def building_the_model() -> Iterator[None]:
    """Note on an exception that it is about the recipe's model."""
    try:
        yield
    except Exception as error:
        error.add_note(BUILDING_THE_MODEL)
        raise


def in_words(error: BaseException) -> str:
    """The type and the message of an exception."""
    return f"{type(error).__name__}: {error}"


def leave_evidence(error: BaseException) -> None:
    """Describe an exception in the folder of the job's start, if there is one; the first of a start is kept."""
    if folder := os.environ.get("LARGEBATCH_LOGS"):
        failure = {"message": in_words(error), "kind": kind_of(error), "exception": type(error).__name__}
        with suppress(OSError), Path(folder, FAILURE).open("x", encoding="utf-8") as file:
            json.dump(failure, file)
