"""An sbatch script as Slurm reads it: options of its `#SBATCH` lines, and of sbatch's command line, which win."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from largebatch.lint.files import read_text
from largebatch.lint.findings import COMMAND_LINE
from largebatch.lint.shell import ASSIGNMENT, Command, read_commands

MAGIC = "#SBATCH"
SHORT_OPTIONS = {
    "a": "array",
    "A": "account",
    "b": "begin",
    "c": "cpus-per-task",
    "C": "constraint",
    "d": "dependency",
    "D": "chdir",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "m": "distribution",
    "M": "clusters",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "O": "overcommit",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "s": "oversubscribe",
    "S": "core-spec",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "W": "wait",
    "x": "exclude",
}
OTHER_NAMES = {"tasks-per-node": "ntasks-per-node", "workdir": "chdir"}
# Options that take no value, or one behind "=" only.
WITHOUT_VALUE = {
    "contiguous",
    "exclusive",
    "get-user-env",
    "help",
    "hold",
    "ignore-pbs",
    "nice",
    "no-kill",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "parsable",
    "propagate",
    "quiet",
    "reboot",
    "requeue",
    "spread-job",
    "test-only",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "wait",
}
VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^}]*\}|\([^)]*\))|`[^`]*`")


@dataclass(frozen=True)
class Option:
    """An option of sbatch under its long name; `value` is empty for one that takes none."""

    name: str
    value: str
    file: str
    line: int

    @property
    def variables(self) -> list[str]:
        """Variables and substitutions in it: of a script's line, Slurm expands none."""
        return VARIABLE.findall(self.value) if self.line else []


@dataclass(frozen=True)
class Script:
    """An sbatch script, with the options of the command line behind its own."""

    path: Path
    text: str
    options: tuple[Option, ...]
    late_lines: tuple[int, ...]
    """`#SBATCH` lines behind the first command, which Slurm does not read."""
    unreadable: tuple[tuple[int, str], ...]
    """`#SBATCH` lines that sbatch refuses, and why."""
    commands: Sequence[Command] = field(repr=False)

    def option(self, *names: str) -> Option | None:
        """The option of one of these names that is in force."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def readable(self, name: str) -> Option | None:
        """The option in force, unless it has variables in it, which are a finding of their own."""
        option = self.option(name)
        return None if option is None or option.variables else option

    def variable(self, name: str) -> "Variable | None":
        """What the script sets a variable to."""
        found = None
        for command in self.commands:
            words = command.words[1:] if command.words[0].text == "export" else command.words[:1]
            for word in words:
                match = ASSIGNMENT.match(word.text)
                if match and match[1] == name:
                    value = word.text[match.end() :]
                    default = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", value)
                    found = Variable(default[1].strip("\"'") if default else value, word.line, default is not None)
        return found


@dataclass(frozen=True)
class Variable:
    """A variable that a script sets; `is_default` where it has the form `${NAME:-value}`, so that others can set it."""

    value: str
    line: int
    is_default: bool


def read_script(path: Path, sbatch_options: Sequence[str] = ()) -> Script:
    """Read an sbatch script.

    Args:
        path: The script.
        sbatch_options: Words of sbatch's command line, which take precedence over the script's own.

    Raises:
        UserError: It cannot be read.
    """
    text = read_text(path)
    lines = [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), 1)]
    first_command = next((number for number, line in lines if line.strip() and not line.lstrip().startswith("#")), None)
    options: list[Option] = []
    late, unreadable = [], []
    for number, line in lines:
        if not line.startswith(MAGIC):
            continue
        if first_command is not None and number > first_command:
            late.append(number)
            continue
        try:
            words = shlex.split(line[len(MAGIC) :], comments=True)
        except ValueError:
            unreadable.append((number, f"{line} opens a quotation and does not close it"))
            continue
        for name, value in read_options(words):
            if name:
                options.append(Option(name, value, str(path), number))
            else:
                unreadable.append((number, f"{value} is not an option"))
    given = [Option(name, value, COMMAND_LINE, 0) for name, value in read_options(sbatch_options) if name]
    commands = read_commands(text.replace("\r\n", "\n"))
    return Script(path, text, (*options, *given), tuple(late), tuple(unreadable), commands)


def read_options(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The options in words of sbatch, under their long names; a word that is no option has the name ""."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = OTHER_NAMES.get(name, name)
            if not equals and name not in WITHOUT_VALUE:
                value = next(rest, "")
            yield name, value
        elif word.startswith("-") and len(word) > 1:
            yield from _short_options(word[1:], rest)
        else:
            yield "", word


def _short_options(letters: str, rest: Iterator[str]) -> Iterator[tuple[str, str]]:
    """`-HN4` is `--hold --nodes=4`."""
    while letters:
        name, letters = SHORT_OPTIONS.get(letters[0], letters[0]), letters[1:]
        if name in WITHOUT_VALUE:
            yield name, ""
        else:
            yield name, letters or next(rest, "")
            return
