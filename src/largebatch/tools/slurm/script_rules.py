"""Rules for a batch script: whether it fits the recipe and the strategy that it names."""

from collections.abc import Iterator
from pathlib import Path

from largebatch.errors import ConfigError
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, BatchScript
from largebatch.tools.slurm.findings import Finding

MAX_NODE_COUNTS = 6


def script_findings(script: BatchScript) -> Iterator[Finding]:
    """Yield what is wrong with a batch script, except for its options, which sbatch checks."""
    yield from _recipe(script)
    yield from _strategy(script)
    yield from _plan(script)


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
    node_counts, processes = script.layout
    problems: dict[int, str] = {}
    for nodes in node_counts:
        try:
            resolve(script.config, nodes * processes)
        except ConfigError as error:
            problems[nodes] = error.problems[0]
    if problems:
        shown = ", ".join(map(str, list(problems)[:MAX_NODE_COUNTS]))
        more = ", …" if len(problems) > MAX_NODE_COUNTS else ""
        why, _, remedy = next(iter(problems.values())).partition("; ")
        why = f"nodes x processes per node = {shown}{more} x {processes}: {why}"
        yield Finding(str(script.path), 0, "no-plan", why, remedy)
