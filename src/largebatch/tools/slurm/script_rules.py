"""Rules for a batch script: its `#SBATCH` lines, and whether it fits the recipe and the strategy that it names."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from largebatch.errors import ConfigError
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, BatchScript, Option, log_path, sbatch_lines
from largebatch.tools.slurm.findings import COMMAND_LINE, Finding
from largebatch.tools.slurm.sbatch import gpus, gpus_of_gres, node_counts, positive, seconds

MOST_COUNTS = 6
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^}]*\}|\([^)]*\))|`[^`]*`")
_UNEVEN = "it does not say how many GPUs each node gives, but all nodes must start the same number of processes"
_ONE_TASK = "slurm/launch.sh starts one task per node: the launcher, which starts the node's processes"
_STOP_IN_TIME = "the script waits for USR1 before the time limit; without B: the signal kills the launchers instead"

OPTION_RULES: dict[str, tuple[Callable[[str], object], str, str]] = {
    "nodes": (node_counts, "not a number of nodes", "write --nodes=4 or --nodes=2-4"),
    "cpus-per-task": (positive, "not a number of CPUs", "write --cpus-per-task=16"),
    "gpus-per-node": (gpus, "not a number of GPUs", "write --gpus-per-node=8 or --gpus-per-node=h100:8"),
    "gpus-per-task": (gpus, "not a number of GPUs", "write --gpus-per-task=8"),
    "gres": (gpus_of_gres, "not a number of GPUs", "write --gres=gpu:8 or --gres=gpu:h100:8"),
    "gpus": (lambda _: None, _UNEVEN, "write --gpus-per-node instead"),
    "gpus-per-socket": (lambda _: None, _UNEVEN, "write --gpus-per-node instead"),
    "ntasks-per-node": (re.compile("1").fullmatch, _ONE_TASK, "remove it"),
    "tasks-per-node": (re.compile("1").fullmatch, _ONE_TASK, "remove it"),
    "time": (seconds, "the partition's default limit would apply", "write --time=12:00:00 or --time=2-00:00:00"),
    "signal": (re.compile(r"B:(?:SIG)?USR1@\d+").fullmatch, _STOP_IN_TIME, "write --signal=B:USR1@300"),
    "requeue": (re.compile("").fullmatch, "a job that loses a node does not resume by itself", "write --requeue"),
    "open-mode": (re.compile("append").fullmatch, "a requeued job overwrites its log", "write --open-mode=append"),
}
"""For each option: a reader that returns None for an invalid value, why that is wrong, and the remedy."""
REQUIRED = ("time", "signal", "requeue", "open-mode")


def script_findings(script: BatchScript) -> Iterator[Finding]:
    """Yield what is wrong with a script, except for what sbatch itself refuses at once."""
    for rule in (_lines, _options, _time, _whole_nodes, _recipe, _strategy, _plan):
        yield from rule(script)


def _at(option: Option, rule: str, why: str, remedy: str) -> Finding:
    return Finding(option.file, option.line, rule, why, remedy)


# --- the `#SBATCH` lines ------------------------------------------------------------------------------------------


def _lines(script: BatchScript) -> Iterator[Finding]:
    for line, text in enumerate(script.text.splitlines(), 1):
        if re.match(r"#\s+SBATCH\s+-", text):
            why, remedy = "to Slurm, # SBATCH is a comment", "write #SBATCH, or ##SBATCH if a comment is meant"
            yield Finding(str(script.path), line, "commented-sbatch-line", why, remedy)
    for line, _, is_read in sbatch_lines(script.text):
        if not is_read:
            why = "Slurm does not read #SBATCH lines after the first command"
            yield Finding(str(script.path), line, "late-sbatch-line", why, "move it above the first command")


def _options(script: BatchScript) -> Iterator[Finding]:
    for name in REQUIRED:
        if name not in script.options:
            _, why, remedy = OPTION_RULES[name]
            yield Finding(str(script.path), 1, name, f"--{name} is missing: {why}", remedy)
    for name, option in script.options.items():
        read, why, remedy = OPTION_RULES.get(name, (str, "", ""))
        if option.line and (variable := _VARIABLE.search(option.value)):
            why = f"Slurm does not expand variables in #SBATCH lines: {variable[0]} stays as it is"
            yield _at(option, "variable-in-sbatch-line", why, f"write the value, or pass --{name} to sbatch")
        elif read(option.value) is None:
            yield _at(option, name, f"--{name}={option.value}: {why}", remedy)
        elif name in ("output", "error") and not (folder := Path(log_path(script, option)).parent).is_dir():
            why = f"--{name}: there is no folder {folder}; Slurm does not create it, and the job fails silently"
            yield _at(option, "log-folder", why, f"create it: mkdir -p {folder}; or write another file")


def _time(script: BatchScript) -> Iterator[Finding]:
    time, signal = script.options.get("time"), script.options.get("signal")
    if not (time and signal and script.config):
        return
    lead = re.search(r"@(\d+)$", signal.value)
    earliest = max(int(lead[1]) if lead else 0, script.config.faults.time_limit_margin_seconds)
    limit = seconds(time.value)
    if limit is not None and limit <= earliest:
        why = f"--time={time.value}: the run is asked to stop {earliest:g} seconds before the limit, and never trains"
        yield _at(time, "time-too-short", why, "write more than --signal and faults.time_limit_margin_seconds")


def _whole_nodes(script: BatchScript) -> Iterator[Finding]:
    memory, exclusive = script.options.get("mem"), script.options.get("exclusive")
    if exclusive and not script.options.keys() & {"mem", "mem-per-cpu", "mem-per-gpu"}:
        why = "--exclusive: the job gets whole nodes, but only the partition's default memory"
        yield _at(exclusive, "whole-nodes", why, "write --mem=0 as well")
    if memory and memory.value == "0" and not exclusive:
        why = "--mem=0: the job gets all the memory of its nodes, but other jobs may get their CPUs"
        yield _at(memory, "whole-nodes", why, "write --exclusive as well")


# --- the recipe and the strategy ----------------------------------------------------------------------------------


def _recipe(script: BatchScript) -> Iterator[Finding]:
    file, name = str(script.path), script.path.stem
    value, line = script.variable("RECIPE")
    if script.recipe is None:
        why = f"RECIPE: there is no file {value} in {Path.cwd()}" if value else "RECIPE is not set"
        remedy = f"write RECIPE=recipes/TASK/{name}.json, the path from the top of the repository"
        yield Finding(file, line, "recipe-missing", why, remedy)
    elif script.recipe.stem != name:
        why = f"RECIPE is {script.recipe.name}, but the script is {script.path.name}: they must have the same name"
        yield Finding(file, line, "names-differ", why, f"name {name}.json, or rename the script")
    elif not (train := script.recipe.with_name("train.py")).is_file():
        why = f"there is no {train} to train {script.recipe.name} with"
        yield Finding(file, line, "train-missing", why, "move the recipe to its task's folder")


def _strategy(script: BatchScript) -> Iterator[Finding]:
    value, line = script.variable("STRATEGY")
    file = str(script.path)
    if value not in ("", script.strategy) and "${STRATEGY" not in script.text:
        why = f"STRATEGY={value} cannot be overridden: {script.strategy} would not be used"
        yield Finding(file, line, "strategy", why, f"write STRATEGY=${{STRATEGY:-{value}}}")
    if script.given_strategy:
        file, line = COMMAND_LINE, 0
    if not script.strategy:
        yield Finding(file, line, "strategy", "STRATEGY is not set", "write STRATEGY=${STRATEGY:-ddp}")
    elif not script.accelerate_config.is_file():
        why = f"STRATEGY {script.strategy}: there is no {script.accelerate_config}"
        known = ", ".join(sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml")))
        yield Finding(file, line, "strategy", why, f"write one of {known}, or the path of an Accelerate config")
    elif script.config and (entry := STRATEGIES.get(script.accelerate_config.stem.partition("_")[0])):
        refusal = entry.refusal_of(script.config)
        if refusal:
            yield Finding(file, line, "strategy", f"STRATEGY {script.strategy}: {refusal.why}", refusal.remedy)


def _plan(script: BatchScript) -> Iterator[Finding]:
    """The batch must divide for every number of nodes that the job may get."""
    if script.config is None or script.layout is None:
        return
    counts, processes = script.layout
    problems: dict[int, str] = {}
    for nodes in counts:
        try:
            resolve(script.config, nodes * processes)
        except ConfigError as error:
            problems[nodes] = error.problems[0]
    if problems:
        shown = ", ".join(map(str, list(problems)[:MOST_COUNTS])) + (", …" if len(problems) > MOST_COUNTS else "")
        why, _, remedy = next(iter(problems.values())).partition("; ")
        option = script.options.get("nodes")
        place = (option.file, option.line) if option else (str(script.path), 1)
        yield Finding(*place, "no-plan", f"nodes x processes per node = {shown} x {processes}: {why}", remedy)
