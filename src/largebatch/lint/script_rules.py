"""Rules for the options of an sbatch script."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from largebatch.lint.findings import Finding
from largebatch.lint.log_path import log_path
from largebatch.lint.sbatch import Option, Script
from largebatch.lint.slurm_values import gpus, gpus_of_gres, node_counts, seconds

LONGEST_LEAD = 65535
_COMMENTED = re.compile(r"#\s+SBATCH\s+-")
_SIGNAL = re.compile(r"B:(?:SIG)?USR1@(\d+)")
_SIGNAL_REMEDY = "write --signal=B:USR1@SECONDS, such as B:USR1@300"


def script_findings(script: Script) -> Iterator[Finding]:
    """What is wrong with the options of a script."""
    for rule in (_lines, _duplicates, _variables, _values, _tasks, _gpus, _requeue, _time, _signal, _log_folders):
        yield from rule(script)


def signal_lead(script: Script) -> tuple[int, Option] | None:
    """Seconds before the time limit at which the batch script gets its signal, if that is said in a valid way."""
    option = script.readable("signal")
    match = _SIGNAL.fullmatch(option.value) if option else None
    if option is None or match is None or int(match[1]) > LONGEST_LEAD:
        return None
    return int(match[1]), option


def time_limit(script: Script) -> tuple[int, Option] | None:
    """The time limit in seconds, if there is one that can be read."""
    option = script.readable("time")
    try:
        limit = seconds(option.value) if option else None
    except ValueError:
        return None
    return (limit, option) if option and limit is not None else None


def _at(option: Option, rule: str, why: str, remedy: str) -> Finding:
    return Finding(option.file, option.line, rule, why, remedy)


def _missing(script: Script, rule: str, why: str, remedy: str) -> Finding:
    return Finding(str(script.path), 1, rule, why, remedy)


def _lines(script: Script) -> Iterator[Finding]:
    file = str(script.path)
    if "\r\n" in script.text:
        line = script.text[: script.text.index("\r\n")].count("\n") + 1
        yield Finding(
            file, line, "dos-line-breaks", "sbatch refuses lines that end in \\r\\n", f"run sed -i 's/\\r$//' {file}"
        )
    for line, problem in script.unreadable:
        yield Finding(file, line, "sbatch-line", f"sbatch refuses this line: {problem}", "write #SBATCH --option=value")
    for line, text in enumerate(script.text.splitlines(), 1):
        if _COMMENTED.match(text):
            why = f"to Slurm, {text.split()[0]} {text.split()[1]} is a comment"
            yield Finding(file, line, "commented-sbatch-line", why, "write #SBATCH, or ##SBATCH where it is meant")
    for line in script.late_lines:
        yield Finding(
            file,
            line,
            "late-sbatch-line",
            "Slurm reads no #SBATCH line behind the first command",
            "move it above the first command",
        )


def _duplicates(script: Script) -> Iterator[Finding]:
    first: dict[tuple[str, str], Option] = {}
    for option in script.options:
        earlier = first.setdefault((option.file, option.name), option)
        if earlier is not option and option.name != "verbose":
            where = f"in line {earlier.line}" if earlier.line else "before"
            yield _at(
                option,
                "duplicate-option",
                f"--{option.name} was given {where} already, and the last one counts",
                "keep one of them",
            )


def _variables(script: Script) -> Iterator[Finding]:
    for option in script.options:
        for variable in option.variables:
            yield _at(
                option,
                "variable-in-sbatch-line",
                f"Slurm expands no variables in #SBATCH lines: {variable} stays as it is",
                f"write the value, or give --{option.name} on sbatch's command line",
            )


def _values(script: Script) -> Iterator[Finding]:
    for name, read, example in (
        ("nodes", node_counts, "--nodes=4 or --nodes=2-4"),
        ("time", seconds, "--time=12:00:00 or --time=2-00:00:00"),
        ("gpus-per-node", gpus, "--gpus-per-node=8 or --gpus-per-node=h100:8"),
        ("gpus-per-task", gpus, "--gpus-per-task=8"),
        ("gres", gpus_of_gres, "--gres=gpu:8 or --gres=gpu:h100:8"),
        ("cpus-per-task", _positive, "--cpus-per-task=16"),
    ):
        option = script.readable(name)
        if option and _fails(read, option.value):
            yield _at(option, "option-value", f"--{name} cannot be {option.value!r}", f"write {example}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text!r} is not positive")
    return value


def _fails(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return True
    return False


def _tasks(script: Script) -> Iterator[Finding]:
    reason = "slurm/launch.sh starts one task a node, the launcher, which starts the node's processes"
    per_node, total, nodes = (script.option(name) for name in ("ntasks-per-node", "ntasks", "nodes"))
    if per_node and not per_node.variables:
        if per_node.value != "1":
            yield _at(per_node, "tasks-per-node", f"--ntasks-per-node is {per_node.value}: {reason}", "remove it")
        elif nodes and "-" in nodes.value:
            why = f"with --ntasks-per-node Slurm gives a job the fewest nodes of --nodes={nodes.value}"
            yield _at(per_node, "fewest-nodes", why, "remove it")
    if total and not total.variables and total.value != (nodes.value if nodes else "1"):
        where = f"--nodes={nodes.value}" if nodes else "one node"
        why = f"--ntasks={total.value} is not one task a node on {where}"
        yield _at(total, "tasks-per-node", why, "remove it")


def _gpus(script: Script) -> Iterator[Finding]:
    for name in ("gpus", "gpus-per-socket"):
        option = script.option(name)
        if option:
            why = f"--{name} leaves open how many GPUs each node gives, and all nodes must start as many processes"
            yield _at(option, "uneven-gpus", why, "write --gpus-per-node instead")


def _requeue(script: Script) -> Iterator[Finding]:
    option = script.option("requeue", "no-requeue")
    if option is None:
        why = "--requeue is missing: a job whose node is lost does not go on by itself"
        yield _missing(script, "requeue", why, "write --requeue")
    elif option.name == "no-requeue":
        yield _at(option, "requeue", "--no-requeue: a job whose node is lost does not go on by itself", "remove it")
    option = script.option("open-mode")
    if option is None:
        why = "--open-mode is missing: a requeued job may write over the log of its earlier start"
        yield _missing(script, "open-mode", why, "write --open-mode=append")
    elif option.value != "append" and not option.variables:
        why = f"--open-mode={option.value}: a requeued job writes over the log of its earlier start"
        yield _at(option, "open-mode", why, "write --open-mode=append")


def _time(script: Script) -> Iterator[Finding]:
    if script.option("time") is None:
        why = "--time is missing: the partition's default limit ends the job at a time that nobody chose"
        yield _missing(script, "time", why, "write a limit such as --time=12:00:00")


def _signal(script: Script) -> Iterator[Finding]:
    option = script.option("signal")
    if option is None:
        why = "--signal is missing: the job is killed at its time limit without being asked to stop"
        yield _missing(script, "signal", why, _SIGNAL_REMEDY)
    elif not option.variables and signal_lead(script) is None:
        yield _at(option, "signal", f"--signal={option.value}: {_wrong_signal(option.value)}", _SIGNAL_REMEDY)


def _wrong_signal(value: str) -> str:
    target, _, signal = value.rpartition(":")
    name, _, lead = signal.partition("@")
    if "B" not in target:
        return "without B: the signal goes to the launchers, which it kills, and not to the script, which waits for it"
    if name not in ("USR1", "SIGUSR1"):
        return "the script waits for USR1"
    if not lead:
        return "without @SECONDS it comes 60 seconds before the time limit"
    return f"the time before the limit is a number of seconds up to {LONGEST_LEAD}"


def _log_folders(script: Script) -> Iterator[Finding]:
    for name in ("output", "error"):
        option = script.readable(name)
        if option is None:
            continue
        folder = Path(log_path(script, option)[0]).parent
        if not folder.is_dir():
            why = f"--{name}: there is no folder {folder}; Slurm makes none, and the job fails without a word"
            yield _at(option, "log-folder", why, f"make it: mkdir -p {folder}; or write another file")
