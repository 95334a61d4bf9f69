"""Where Slurm writes what a job prints."""

import re
from collections.abc import Mapping
from pathlib import Path

from largebatch.lint.sbatch import Option, Script

DEFAULT_OUTPUT = "slurm-%j.out"
_PATTERN = re.compile(r"%(\d*)([A-Za-z%])")


def job_name(script: Script) -> str:
    """The job's name: `--job-name`, or the script's file name."""
    option = script.option("job-name")
    return option.value if option else script.path.name


def log_path(script: Script, output: Option | None, job_id: str | None = None) -> tuple[str, list[str]]:
    """The file of `--output` or `--error`, relative to the current folder, and the patterns in it that are not known.

    Args:
        script: The script, with the options in force.
        output: The option; None is Slurm's own default.
        job_id: The job's number, if it has one already.
    """
    known = {"%": "%", "x": job_name(script)} | ({"j": job_id, "A": job_id} if job_id else {})
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

    return _PATTERN.sub(replace, pattern), unknown
