"""Rules for a script together with the recipe and the strategy it names."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from largebatch.errors import ConfigError
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.lint.files import COMMAND_LINE, Finding
from largebatch.tools.lint.job import ACCELERATE_CONFIGS, LAUNCH, Job, strategy_file
from largebatch.tools.lint.sbatch import Option
from largebatch.tools.lint.script_rules import signal_lead, time_limit

MEASURED_LINES = 20
MOST_COUNTS = 6


def job_findings(job: Job) -> Iterator[Finding]:
    """What does not fit together in a job."""
    for rule in (_recipe, _launch, _strategy, _plan, _lead):
        yield from rule(job)


# --- what the script names ----------------------------------------------------------------------------------------


def _recipe(job: Job) -> Iterator[Finding]:
    file, name = str(job.script.path), job.script.path.stem
    named = job.script.variable("RECIPE")
    if named is None:
        remedy = f"write RECIPE=recipes/TASK/{name}.json above {LAUNCH}"
        yield Finding(file, 1, "recipe-missing", "RECIPE is not set", remedy)
    elif job.recipe is None:
        why = f"RECIPE: there is no file {named.value or '(empty)'} in {Path.cwd()}"
        yield Finding(file, named.line, "recipe-missing", why, "write the path from the top of the repository")
    elif job.recipe.stem != name:
        why = f"RECIPE is {job.recipe.name}, the script is {job.script.path.name}: recipe and script have one name"
        yield Finding(file, named.line, "names-differ", why, f"name {name}.json, or rename the script")
    elif not (train := job.recipe.parent / "train.py").is_file():
        why = f"there is no {train} to train {job.recipe.name} with"
        remedy = "move the recipe to the folder of its task, or copy a train.py there"
        yield Finding(file, named.line, "train-missing", why, remedy)


def _launch(job: Job) -> Iterator[Finding]:
    sourced = job.script.lines_with(r"(?:.*(?:&&|;)\s*)?(?:source|\.)\s+(.*)")
    line, launch = next(((line, word) for line, word in sourced if Path(word).name == LAUNCH.name), (1, None))
    if launch is None:
        why = f"{LAUNCH} is not sourced, which starts the recipe on every node"
        yield Finding(str(job.script.path), line, "launch-missing", why, f"end the script with: source {LAUNCH}")
    elif "$" not in launch and not Path(launch).is_file():
        why = f"there is no file {launch} in {Path.cwd()}"
        yield Finding(str(job.script.path), line, "launch-missing", why, f"write: source {LAUNCH}")


def _strategy(job: Job) -> Iterator[Finding]:
    default = job.script.variable("STRATEGY")
    given = job.command_line.strategy
    file, line = str(job.script.path), default.line if default else 1
    if given and default and not default.is_default and given != default.value:
        why = f"STRATEGY={default.value} leaves no choice: {given} would not be used"
        yield Finding(file, line, "strategy", why, f"write STRATEGY=${{STRATEGY:-{default.value}}}")
    if given:
        file, line = COMMAND_LINE, 0
    known = ", ".join(sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml")))
    if job.strategy is None:
        yield Finding(file, line, "strategy", "STRATEGY is not set", "write STRATEGY=${STRATEGY:-ddp}")
    elif job.accelerate_config is None:
        why = f"STRATEGY {job.strategy}: there is no {strategy_file(job.strategy)}"
        yield Finding(file, line, "strategy", why, f"write one of {known}, or the path of an Accelerate config")
    elif job.config and (entry := STRATEGIES.get(strategy_file(job.strategy).stem.partition("_")[0])):
        refusal = entry.refusal(job.config.precision, job.config.optimizer.name)
        if refusal:
            yield Finding(file, line, "strategy", f"STRATEGY {job.strategy}: {refusal.why}", refusal.remedy)


# --- what the recipe needs ----------------------------------------------------------------------------------------


def _plan(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    try:
        counts = job.node_counts()
        processes, per_node = job.processes_per_node()
    # A finding of its own.
    except ValueError:
        return
    problems: dict[int, str] = {}
    for nodes in counts:
        try:
            resolve(job.config, nodes * processes)
        except ConfigError as error:
            problems[nodes] = error.problems[0]
    if problems:
        shown = ", ".join(str(nodes) for nodes in list(problems)[:MOST_COUNTS])
        shown += ", …" if len(problems) > MOST_COUNTS else ""
        option = job.script.option("nodes") or per_node
        why, _, remedy = next(iter(problems.values())).partition("; ")
        place = (option.file, option.line) if option else (str(job.script.path), 1)
        yield Finding(*place, "no-plan", f"nodes x processes per node = {shown} x {processes}: {why}", remedy)


def _lead(job: Job) -> Iterator[Finding]:
    signal = signal_lead(job.script)
    if signal is None or job.config is None:
        return
    lead, option = signal
    margin = job.config.faults.time_limit_margin_seconds
    if lead < margin:
        yield _short_lead(
            option, f"{lead} seconds are less than faults.time_limit_margin_seconds {margin:g} of {job.recipe}", margin
        )
    two_steps = 2 * (_measured_step_seconds(job.run_dir) or 0)
    if lead < two_steps:
        yield _short_lead(option, f"{lead} seconds are less than two steps, {two_steps:.0f} as measured", two_steps)
    limit, time = time_limit(job.script) or (None, option)
    if limit is not None and (earliest := max(lead, margin)) >= limit:
        why = (
            f"--time={time.value} is {limit} seconds, and the run is asked to stop {earliest:g} seconds before its end "
            "(--signal and faults.time_limit_margin_seconds)"
        )
        yield Finding(time.file, time.line, "time-too-short", why, "write a longer limit")


def _short_lead(option: Option, why: str, needed: float) -> Finding:
    remedy = f"write --signal=B:USR1@{int(-(-needed // 1))} or more"
    return Finding(option.file, option.line, "lead-too-short", f"--signal: {why}: the run cannot save in time", remedy)


def _measured_step_seconds(run_dir: Path | None) -> float | None:
    """Seconds of a step in the newest lines of a run's metrics, if it has any."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if run_dir else []
    except (OSError, UnicodeDecodeError):
        return None
    seconds = []
    for line in lines[-MEASURED_LINES:]:
        try:
            logged = json.loads(line)
            seconds.append(logged["global_batch_size"] / logged["samples_per_second"])
        # A line that was cut off when the run was killed.
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue
    return statistics.median(seconds) if seconds else None
