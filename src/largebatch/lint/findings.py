"""What a rule has to say."""

from dataclasses import dataclass

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Finding:
    """A mistake in a file.

    Args:
        file: The file, as it was named; or "the command line".
        line: The line in it, from 1; 0 on the command line.
        rule: The rule's name.
        why: What was found, and why it is wrong.
        remedy: What to write instead.
    """

    file: str
    line: int
    rule: str
    why: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.why}; {self.remedy} [{self.rule}]"
