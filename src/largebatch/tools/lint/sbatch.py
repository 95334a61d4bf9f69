"""An sbatch script as Slurm reads it: options of its `#SBATCH` lines, and of sbatch's command line, which win."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from largebatch.tools.lint.files import COMMAND_LINE, read_text

MAGIC = "#SBATCH"
DEFAULT_OUTPUT = "slurm-%j.out"
SHORT_OPTIONS = dict(
    re.findall(
        r"(\S)=(\S+)",
        "a=array A=account b=begin c=cpus-per-task C=constraint d=dependency D=chdir e=error F=nodefile G=gpus "
        "H=hold i=input J=job-name k=no-kill L=licenses m=distribution M=clusters n=ntasks N=nodes o=output "
        "O=overcommit p=partition q=qos Q=quiet s=oversubscribe S=core-spec t=time v=verbose w=nodelist W=wait "
        "x=exclude",
    )
)
OTHER_NAMES = {"tasks-per-node": "ntasks-per-node", "workdir": "chdir"}
# Options that take no value, or one behind "=" only.
WITHOUT_VALUE = re.findall(
    r"\S+",
    "contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue overcommit oversubscribe "
    "parsable propagate quiet reboot requeue spread-job test-only usage use-min-nodes verbose version wait",
)
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

    def option(self, *names: str) -> Option | None:
        """The option of one of these names that is in force."""
        return next((option for option in reversed(self.options) if option.name in names), None)

    def readable(self, name: str) -> Option | None:
        """The option in force, unless it has variables in it, which are a finding of their own."""
        option = self.option(name)
        return None if option is None or option.variables else option

    def variable(self, name: str) -> "Variable | None":
        """Return what the script sets a variable to, by a line of its own."""
        found = None
        for number, value in self.lines_with(rf"(?:export\s+)?{name}=(.*)"):
            default = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", value)
            found = Variable(default[1] if default else value, number, default is not None)
        return found

    def lines_with(self, pattern: str) -> Iterator[tuple[int, str]]:
        """Yield the number of each line that begins with a pattern, and its group's first word, without quotes."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if match := re.match(pattern, line.strip()):
                try:
                    yield number, next(iter(shlex.split(match[1], comments=True)), "").removesuffix(";")
                except ValueError:
                    # A quotation that ends on another line.
                    yield number, match[1]


@dataclass(frozen=True)
class Variable:
    """A variable that a script sets; `is_default` where it has the form `${NAME:-value}`, so that others can set it."""

    value: str
    line: int
    is_default: bool


def read_script(path: Path, sbatch_options: Sequence[str] = ()) -> Script:
    """Read an sbatch script, whose own options give way to those in words of sbatch's command line.

    Raises:
        UserError: It cannot be read.
    """
    text = read_text(path)
    lines = [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), 1)]
    first_command = next((number for number, line in lines if line.strip() and not line.lstrip().startswith("#")), None)
    options: list[Option] = []
    late = []
    for number, line in lines:
        if not line.startswith(MAGIC):
            continue
        if first_command is not None and number > first_command:
            late.append(number)
            continue
        # What opens a quotation and does not close it, or is not an option, sbatch itself refuses.
        with suppress(ValueError):
            words = shlex.split(line[len(MAGIC) :], comments=True)
            options += [Option(name, value, str(path), number) for name, value in read_options(words) if name]
    given = [Option(name, value, COMMAND_LINE, 0) for name, value in read_options(sbatch_options) if name]
    return Script(path, text, (*options, *given), tuple(late))


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


def log_path(script: Script, output: Option | None, job_id: str | None = None) -> tuple[str, list[str]]:
    """Return the file of `--output` or `--error`, relative to the current folder, and the patterns in it not yet known.

    Without the option it is Slurm's own default. The job's number is known once it is submitted.
    """
    name = script.option("job-name")
    known = {"%": "%", "x": name.value if name else script.path.name} | ({"j": job_id, "A": job_id} if job_id else {})
    path, unknown = _expand(output.value if output else DEFAULT_OUTPUT, known)
    folder = script.option("chdir")
    return str(Path(folder.value) / path if folder else path), unknown


def _expand(pattern: str, known: Mapping[str, str]) -> tuple[str, list[str]]:
    unknown = []

    def replace(match: re.Match[str]) -> str:
        width, letter = match.groups()
        if letter not in known:
            unknown.append(match[0])
            return match[0]
        # Slurm fills numbers up with zeros, and nothing else.
        return known[letter].zfill(min(int(width), 10)) if width and known[letter].isdecimal() else known[letter]

    return re.sub(r"%(\d*)([A-Za-z%])", replace, pattern), unknown
