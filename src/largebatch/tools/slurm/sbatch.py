"""Options of sbatch and their values, as Slurm reads them."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

# The short options that say something about the job's size, time and log.
SHORT_OPTIONS = dict(
    re.findall(r"(\S)=(\S+)", "c=cpus-per-task D=chdir e=error G=gpus J=job-name N=nodes n=ntasks o=output t=time")
)
# Options that take no value, or one after "=" only.
WITHOUT_VALUE = re.findall(
    r"\S+",
    "H k O Q s v W consolidate-segments contiguous exclusive external get-user-env help hold ignore-pbs nice no-kill "
    "no-requeue oom-kill-step overcommit oversubscribe parsable propagate quiet reboot requeue resv-ports spread-job "
    "spread-segments stepmgr test-only usage use-min-nodes verbose version wait",
)
# The variables that set options which say something about a job, by sbatch(1), "Input environment variables"; there are
# none for nodes, tasks and CPUs per task.
IN_ENVIRONMENT = re.findall(
    r"\S+",
    "error exclusive gpus gpus-per-node gpus-per-task gres job-name mem mem-per-cpu mem-per-gpu no-requeue open-mode "
    "output requeue signal time",
)
OTHER_NAMES = {"mem": "mem-per-node", "time": "timelimit"}
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def read_options(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the options in words of sbatch by their long names, with their values, which may be empty.

    A word that is not an option has the name "", and `--no-requeue` is `--requeue` with the value "no".
    """
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            if not word.startswith("-") or len(word) == 1:
                yield "", word
                continue
            name, value = SHORT_OPTIONS.get(word[1], word[1]), word[2:]
        if not value and not equals and name not in WITHOUT_VALUE:
            value = next(rest, "")
        yield ("requeue", "no") if name == "no-requeue" else (name, value)


def read_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the variables of `IN_ENVIRONMENT` that are set, with the long name and the value of each one's option."""
    for name in IN_ENVIRONMENT:
        variable = "SBATCH_" + OTHER_NAMES.get(name, name).replace("-", "_").upper()
        value = environment.get(variable)
        if value is None:
            continue
        if name in WITHOUT_VALUE and (value == "yes" or value.isdecimal()):
            if value.isdecimal() and not int(value):
                continue
            value = ""
        yield variable, *(("requeue", "no") if name == "no-requeue" else (name, value))


# --- values: None stands for one that is not valid ----------------------------------------------------------------


def seconds(text: str) -> float | None:
    """The seconds of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    if text.lower() in ("unlimited", "infinite", "0", "-1"):
        return math.inf
    for form in (
        r"(?P<m>\d+)(?::(?P<s>\d+))?",
        r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
        r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?",
    ):
        if match := re.fullmatch(form, text):
            return sum(UNITS[unit] * int(number) for unit, number in match.groupdict(default="0").items())
    return None


def node_counts(text: str) -> range | None:
    """The numbers of nodes that `4` or `2-4` allows."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        return None
    least, most = int(match[1]), int(match[2] or match[1])
    return range(least, most + 1) if 1 <= least <= most else None


def positive(text: str) -> int | None:
    """A whole number of at least 1."""
    return int(text) if text.isdecimal() and int(text) else None


def gpus(text: str) -> int | None:
    """The GPUs of `8`, `h100:8` or `h100:4,a100:4`."""
    matches = [re.fullmatch(r"(?:[A-Za-z][\w.+-]*:)?(\d+)", part) for part in text.split(",")]
    return sum(int(match[1]) for match in matches if match) if all(matches) else None


def gpus_of_gres(text: str) -> int | None:
    """The GPUs of a list of generic resources such as `gpu:8`, `gpu:h100:8` or `gpu,nvme:1`; 0 if there are none."""
    count = 0
    for part in text.split(","):
        if match := re.fullmatch(r"(?:gres[:/])?gpu(?::[A-Za-z][\w.+-]*)?(?::(\d+))?", part):
            count += int(match[1] or 1)
        elif "gpu" in re.split(r"[:/=]", part):
            return None
    return count
