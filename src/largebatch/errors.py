"""Errors that a user can fix.

Each message names what was given, why it is wrong and what to write instead. Recipes and the command line print only
the message, and exit with the class's `exit_code`; any other exception is a bug in largebatch and keeps its traceback.
"""

import errno
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from largebatch.words import bulleted, counted, printable

# Failures of the file system that last until somebody changes something. Any other may pass: the disk has room again,
# the server is back.
PERMANENT_ERRNOS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
    errno.EFBIG,
    errno.ENXIO,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
}
MAX_REASON_CHARACTERS = 300  # of another library's message; some of them contain whole schemas


def reason_of(error: BaseException) -> str:
    """The message of another library's exception in one line, and its type."""
    # The time of `shorten` grows with the square of the length.
    text = textwrap.shorten(str(error)[: 10 * MAX_REASON_CHARACTERS], MAX_REASON_CHARACTERS, placeholder=" …")
    return printable(f"{text} ({type(error).__name__})")


class UserError(ValueError):
    """Something the user gave cannot be used. Exit code 2: refused before training started."""

    exit_code = 2
    title = "error"

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere  # whether every process has this error, so that only one should report it


class ConfigError(UserError):
    """One or more problems in a recipe's JSON or its overrides.

    Args:
        problems: One problem, or several: each a line that starts with its path in the JSON and ends with the remedy.
        source: The file that the config was read from.
    """

    def __init__(self, problems: str | Sequence[str], source: str | Path | None = None):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = str(source) if source else None
        count = counted(len(self.problems), "problem")
        where = f" in {source}" if source else ""
        super().__init__(f"{count}{where}:{bulleted(self.problems)}")


class LaunchError(UserError):
    """The job was launched in a way that would not train the recipe."""


class DataError(UserError):
    """The data set is missing, unreadable, or not the one the recipe describes."""


class BackendMismatch(UserError):
    """The model, optimizer or engine would deviate from the plan, or has state that checkpoints cannot hold."""


class TrainingFailed(UserError):
    """Training itself went wrong, for example a loss that is no longer finite. Exit code 1."""

    exit_code = 1


class StorageError(UserError):
    """The file system failed in a way that may pass: the same command tries again. Exit code 74."""

    exit_code = 74


def is_transient(error: BaseException) -> bool:
    """Whether a file that could not be read may be readable later. One that is missing will not come back."""
    return isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, *PERMANENT_ERRNOS)


@contextmanager
def file_errors(what: str, remedy: str | None = None) -> Iterator[None]:
    """Raise OSErrors of the block as errors that say what failed.

    Args:
        what: What could not be done, such as "--run-dir: /runs/a cannot be written".
        remedy: What to do about an error that lasts; None if it, too, is one of the storage.

    Raises:
        UserError: The error lasts until somebody changes something.
        StorageError: It may pass.
    """
    try:
        yield
    except OSError as error:
        if remedy is not None and error.errno in PERMANENT_ERRNOS:
            raise UserError(f"{what}: {error}; {remedy}") from error
        raise StorageError(f"{what}: {error}; the same command tries again") from error


class RunStopped(UserError):
    """The run was asked to stop, has written a checkpoint and can be resumed. Exit code 75, for "try again later"."""

    exit_code = 75
    title = "stopped"

    def __init__(self, message: str, by_a_person: bool = False):
        super().__init__(message, everywhere=True)
        self.by_a_person = by_a_person  # by the stop file, after which nothing is to start the run again
