"""Errors that a user can fix, and the little that their messages need.

Each message names what was given, why it is wrong and what to write instead. A recipe and the command line print the
message alone, without a traceback, and leave with the class's `exit_code`; any other exception is a bug of ours and
keeps its traceback.
"""

import difflib
import textwrap
from collections.abc import Iterable, Sequence

MOST_OF_A_REASON = 300
"""Characters of another library's message; some go on with whole schemas."""


def reason_of(error: BaseException) -> str:
    """What another library's exception says, in one line, and its type."""
    return f"{textwrap.shorten(str(error), MOST_OF_A_REASON, placeholder=' …')} ({type(error).__name__})"


def counted(number: float, one: str, many: str | None = None, form: str = ",") -> str:
    """ "1 step", "2,000 steps", "0.5 epochs".

    Args:
        number: How many; 1 alone is singular, after it is formatted.
        one: The noun in the singular.
        many: In the plural; None appends an s.
        form: The number's format specification.
    """
    shown = format(number, form)
    return f"{shown} {one if shown == '1' else many or one + 's'}"


def ordinal(number: int) -> str:
    """ "1st", "2nd", "3rd", "11th"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean gpt2_124m?", to be put behind what is wrong; empty where nothing known is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


class UserError(ValueError):
    """Something the user gave cannot be used. Exit code 2: refused before training started."""

    exit_code = 2
    title = "error"

    def __init__(self, message: str = "", everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere
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
