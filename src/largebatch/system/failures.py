"""How processes end, and which failures the same start would meet again. Needs no torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from largebatch.errors import StorageError, TrainingFailed, UserError, reason_of


class Kind(StrEnum):
    """How a process has ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # on request, after a checkpoint or before the first step
    REFUSED = "refused"  # what the user gave cannot be used
    IMPORT = "import"
    MODEL = "model"  # an exception while the recipe was building its model
    TRAINING = "training"  # such as a loss that is not finite
    OUT_OF_MEMORY = "out_of_memory"
    COMMUNICATION = "communication"
    FILES = "files"
    HANG = "hang"
    KILLED = "killed"  # by a signal; the launcher tells, because the process could not
    ERROR = "error"  # any other exception


NOT_RETRYABLE = (Kind.REFUSED, Kind.IMPORT, Kind.MODEL, Kind.TRAINING)  # the same start would fail in the same way

# Class names in place of the classes, which belong to torch and others.
_OF_CLASSES = {
    "OutOfMemoryError": Kind.OUT_OF_MEMORY,
    "DistError": Kind.COMMUNICATION,
    "ConnectionError": Kind.COMMUNICATION,
    "TimeoutError": Kind.COMMUNICATION,
    "HTTPError": Kind.COMMUNICATION,
    "ImportError": Kind.IMPORT,
    "OSError": Kind.FILES,
}
# Of a GPU, also inside what NCCL, cuBLAS, cuDNN and Triton say.
_OUT_OF_MEMORY = re.compile("(?i:CUDA|HIP)[^\n]*out of memory|STATUS_ALLOC_FAILED")
_NO_MEMORY = re.compile("can't allocate memory|Storage size calculation overflowed")  # the host's
# What libraries written in Rust say of the file system, such as safetensors.
_FILES = re.compile(r"Os \{ code: \d+|\(os error \d+\)|IoError")
# What torch, gloo and NCCL say, mostly in the processes that remain after another one went away.
_COMMUNICATION = re.compile(
    "nccl|gloo|process group|connection (closed|reset|refused)|closed by peer|reset by peer|broken pipe|timed out"
    "|socket timeout|remote process exited|recv, got 0 bytes|connectFullMesh failed|pair closure",
    re.IGNORECASE,
)
# The attribute of an exception that was raised while the recipe was building its model.
_IN_THE_MODEL = "raised_while_building_the_model"


def kind_of(error: BaseException) -> Kind:
    """The kind of an exception, by its type, its causes and what other libraries say in it."""
    if isinstance(error, UserError):
        # An error of another process has its exit code, but not its class.
        kinds = {StorageError.exit_code: Kind.FILES, TrainingFailed.exit_code: Kind.TRAINING}
        return kinds.get(error.exit_code, Kind.REFUSED)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause)):
            return Kind.OUT_OF_MEMORY
        names = {parent.__name__ for parent in type(cause).__mro__}
        for name, kind in _OF_CLASSES.items():
            if name in names:
                return kind
        if isinstance(cause, RuntimeError) and _COMMUNICATION.search(str(cause)):
            return Kind.COMMUNICATION
        if _FILES.search(str(cause)):
            return Kind.FILES
        cause = cause.__cause__
    return Kind.MODEL if hasattr(error, _IN_THE_MODEL) else Kind.ERROR


@contextmanager
def building_the_model() -> Iterator[None]:
    """Mark an exception as raised while the recipe was building its model."""
    try:
        yield
    except Exception as error:
        if _NO_MEMORY.search(str(error)):
            raise UserError(
                f"model: it does not fit this machine's memory ({reason_of(error)}); write smaller sizes"
            ) from error
        error.add_note("note: raised while the recipe was building its model")
        setattr(error, _IN_THE_MODEL, True)
        raise


def describe_error(error: BaseException) -> str:
    """The message of an exception and, unless it is a user error, its type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@contextmanager
def storage_errors() -> Iterator[None]:
    """Raise errors of the file system as StorageError; a file that is missing is a bug, and keeps its traceback."""
    try:
        yield
    except Exception as error:
        if kind_of(error) != Kind.FILES or isinstance(error, UserError | FileNotFoundError):
            raise
        raise StorageError(f"{describe_error(error)}; the same command tries again") from error
