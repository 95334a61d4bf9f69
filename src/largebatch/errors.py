"""Errors that a user can mend.

Each message names what was given, why it is wrong and what to write instead. A recipe and the command line print the
message alone, without a traceback, and leave with the class's `exit_code`; any other exception is a bug of ours and
keeps its traceback.
"""

import textwrap
from collections.abc import Sequence

from largebatch.counted import counted

MOST_OF_A_REASON = 300
"""Characters of another library's message; some go on with whole schemas."""


def reason_of(error: BaseException) -> str:
    """What another library's exception says, in one line, and its type."""
    return f"{textwrap.shorten(str(error), MOST_OF_A_REASON, placeholder=' …')} ({type(error).__name__})"


class UserError(ValueError):
    """Something the user gave cannot be used. Exit code 2: refused before training started."""

    exit_code = 2
    title = "error"
    everywhere = False
    """Whether every process of the job has this same error, so that one of them should report it."""


class ConfigError(UserError):
    """One or more problems in a recipe's JSON or its overrides.

    Args:
        problems: One line a problem, each beginning with its path in the JSON and ending with the remedy.
        source: The file the config was read from.
    """

    def __init__(self, problems: Sequence[str], source: str | None = None):
        self.problems = list(problems)
        self.source = source
        count = counted(len(self.problems), "problem")
        title = f"{count} in {source}:" if source else f"{count}:"
        super().__init__("\n".join([title, *(f"  - {problem}" for problem in self.problems)]))


class LaunchError(UserError):
    """The job was launched in a way that would not train what the recipe says."""


class DataError(UserError):
    """The data set is missing, unreadable, or not the one the recipe describes."""


class BackendMismatch(UserError):
    """The model, its optimizer or the engine would do something else than the plan, or has what no checkpoint holds."""


class TrainingFailed(UserError):
    """Training itself went wrong, for example a loss that is no longer finite. Exit code 1."""

    exit_code = 1


class RunStopped(UserError):
    """The run was asked to stop, has written a checkpoint and can be resumed. Exit code 75, for "try again later"."""

    exit_code = 75
    title = "stopped"
