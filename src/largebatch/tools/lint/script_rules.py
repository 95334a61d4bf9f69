"""Rules for an sbatch script: its syntax, and its options."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from largebatch.tools.lint.files import Finding
from largebatch.tools.lint.sbatch import Option, Script, log_path
from largebatch.tools.lint.slurm_values import gpus, gpus_of_gres, node_counts, seconds

LONGEST_LEAD = 65535
_COMMENTED = re.compile(r"#\s+SBATCH\s+-")
_SIGNAL = re.compile(r"B:(?:SIG)?USR1@(\d+)")
_SIGNAL_REMEDY = "write --signal=B:USR1@SECONDS, such as B:USR1@300"


def script_findings(script: Script) -> Iterator[Finding]:
    """Yield what is wrong with the options of a script, but for what sbatch itself refuses at once."""
    for rule in (_lines, _missing, _variables, _values, _tasks, _gpus, _requeue, _signal, _log_folders):
        yield from rule(script)


def syntax_findings(path: Path) -> Iterator[Finding]:
    """Yield where bash cannot read a script, which sbatch does not ask before the job starts."""
    environment = os.environ | {"LC_ALL": "C"}
    result = subprocess.run(["bash", "-n", "--", path], env=environment, capture_output=True, check=False)
    # The exit code is 0 for some errors.
    if said := result.stderr.decode(errors="replace").strip():
        match = re.search(r"line (\d+): (.*)", said)
        line, why = (int(match[1]), match[2]) if match else (1, said)
        yield Finding(str(path), line, "bash-syntax", f"bash cannot read it: {why}", "close what is open there")


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


def _lines(script: Script) -> Iterator[Finding]:
    file = str(script.path)
    for line, text in enumerate(script.text.splitlines(), 1):
        if _COMMENTED.match(text):
            why = f"to Slurm, {text.split()[0]} {text.split()[1]} is a comment"
            yield Finding(file, line, "commented-sbatch-line", why, "write #SBATCH, or ##SBATCH where it is meant")
    for line in script.late_lines:
        why = "Slurm reads no #SBATCH line behind the first command"
        yield Finding(file, line, "late-sbatch-line", why, "move it above the first command")


def _missing(script: Script) -> Iterator[Finding]:
    for name, why, remedy in (
        ("requeue", "a job whose node is lost does not go on by itself", "write --requeue"),
        ("open-mode", "a requeued job may write over the log of its earlier start", "write --open-mode=append"),
        (
            "time",
            "the partition's default limit ends the job at a time that nobody chose",
            "write a limit such as --time=12:00:00",
        ),
        ("signal", "the job is killed at its time limit without being asked to stop", _SIGNAL_REMEDY),
    ):
        if script.option(name, f"no-{name}") is None:
            yield Finding(str(script.path), 1, name, f"--{name} is missing: {why}", remedy)


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
        try:
            read(option.value if option else "1")
        except ValueError:
            assert option is not None
            yield _at(option, "option-value", f"--{name} cannot be {option.value!r}", f"write {example}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text!r} is not positive")
    return value


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
    if option and option.name == "no-requeue":
        yield _at(option, "requeue", "--no-requeue: a job whose node is lost does not go on by itself", "remove it")
    option = script.readable("open-mode")
    if option and option.value != "append":
        why = f"--open-mode={option.value}: a requeued job writes over the log of its earlier start"
        yield _at(option, "open-mode", why, "write --open-mode=append")


def _signal(script: Script) -> Iterator[Finding]:
    option = script.readable("signal")
    if option and signal_lead(script) is None:
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
