"""Rules for the shell of a job's script and its launch file."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.lint.findings import Finding
from largebatch.lint.shell import ASSIGNMENT, Command, Word

# Slurm sets these to another value in each task; in the batch script they are those of the first node.
PER_TASK = {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURMD_NODENAME"}
_COUNT = re.compile(r"--(nnodes|num[_-]machines|num[_-]processes|nproc[_-]per[_-]node)(?:[=\s]+(\d[\w:]*))?")


def shell_findings(path: Path, text: str, commands: Sequence[Command]) -> Iterator[Finding]:
    """What is wrong with a shell script as a launcher of processes.

    Raises:
        UserError: There is no bash to check it with.
    """
    if "\r\n" not in text:
        yield from _syntax(path)
    yield from _expanded_too_early(path, commands)
    yield from _written_twice(path, commands)


def _syntax(path: Path) -> Iterator[Finding]:
    try:
        result = subprocess.run(
            ["bash", "-n", "--", str(path)],
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise UserError("there is no bash to check the scripts with; install it") from None
    if result.returncode:
        message = (result.stderr.splitlines() or ["no message"])[0].removeprefix(f"{path}: ")
        match = re.match(r"line (\d+): (.*)", message)
        line, problem = (int(match[1]), match[2]) if match else (1, message)
        yield Finding(str(path), line, "bash-syntax", f"bash cannot read it: {problem}", "close what is open there")


# --- variables that are expanded on the first node ----------------------------------------------------------------


def _expanded_too_early(path: Path, commands: Sequence[Command]) -> Iterator[Finding]:
    carried = _carried_by_variables(commands)
    found = {
        place
        for command in commands
        if _starts_on_nodes(command)
        for word in command.words
        for place in _per_task_variables(word, carried)
    }
    for name, line in sorted(found, key=lambda place: (place[1], place[0])):
        yield Finding(
            str(path),
            line,
            "expanded-too-early",
            f"${name} is expanded once, on the first node, before srun starts the tasks: all would get the same value",
            f"write it in single quotes, srun bash -c '… ${name} …'",
        )


def _starts_on_nodes(command: Command) -> bool:
    texts = [word.text for word in command.words]
    names = [text.rpartition("/")[2] for text in texts]
    shell = next((number for number, name in enumerate(names) if name in ("bash", "sh")), None)
    return "srun" in names or (shell is not None and any(re.fullmatch(r"-\w*c", text) for text in texts[shell + 1 :]))


def _carried_by_variables(commands: Sequence[Command]) -> dict[str, set[tuple[str, int]]]:
    """For each of the script's own variables, the variables of a task that were expanded when it was set."""
    carried: dict[str, set[tuple[str, int]]] = {}
    for command in commands:
        for word in command.words:
            match = ASSIGNMENT.match(word.text)
            if match and (places := _per_task_variables(word, carried)):
                carried.setdefault(match[1], set()).update(places)
    return carried


def _per_task_variables(word: Word, carried: dict[str, set[tuple[str, int]]]) -> set[tuple[str, int]]:
    places = {(name, line) for name, line in word.expanded if name in PER_TASK}
    return places.union(*(carried.get(name, set()) for name, _ in word.expanded))


# --- numbers that Slurm knows -------------------------------------------------------------------------------------


def _written_twice(path: Path, commands: Sequence[Command]) -> Iterator[Finding]:
    for command in commands:
        for word, following in zip(command.words, [*command.words[1:], None], strict=True):
            for match in _COUNT.finditer(word.text):
                number = match[2]
                if number is None and following and match.end() == len(word.text) and following.text[:1].isdecimal():
                    number = following.text
                if number is not None:
                    yield Finding(
                        str(path),
                        word.lines[match.start()],
                        "written-twice",
                        f"--{match[1]} {number} is written here and in the #SBATCH lines, and one of them will be "
                        "changed alone",
                        "read it from Slurm's environment, as slurm/launch.sh does",
                    )
