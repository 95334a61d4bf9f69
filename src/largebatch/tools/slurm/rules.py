"""Rules for recipes, Accelerate and DeepSpeed configs, and for batch scripts with the recipe and strategy they name."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from largebatch.backend.deepspeed_config import deepspeed_config_problems
from largebatch.backend.launch import FSDP_VERSION, NOT_FSDP2, PRECISION, REFUSED, STARTS_PROCESSES, UNLESS_FSDP
from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, BatchScript, read_text

COMMAND_LINE = "the command line"


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a file."""

    file: str  # the file, as it was named, or "the command line"
    rule: str  # the rule's name
    why: str  # what was found, and why it is wrong
    remedy: str  # what to write instead

    def __str__(self) -> str:
        return f"{self.file}: {self.why}; {self.remedy} [{self.rule}]"


def script_findings(script: BatchScript) -> Iterator[Finding]:
    """Yield what is wrong with a batch script, except for its options, which sbatch checks."""
    yield from _recipe(script)
    yield from _strategy(script)
    yield from _plan(script)


def _recipe(script: BatchScript) -> Iterator[Finding]:
    file, name = str(script.path), script.path.stem
    value = script.variable("RECIPE")
    if script.recipe is None:
        why = f"RECIPE: there is no file {value} in {Path.cwd()}" if value else "RECIPE is not set"
        remedy = f"write RECIPE=recipes/TASK/{name}.json, the path from the top of the repository"
        yield Finding(file, "recipe-missing", why, remedy)
    elif script.recipe.stem != name:
        why = f"RECIPE is {script.recipe.name}, but the script is {script.path.name}: they must have the same name"
        yield Finding(file, "names-differ", why, f"name {name}.json, or rename the script")
    elif not (train := script.recipe.with_name("train.py")).is_file():
        why = f"there is no {train} to train {script.recipe.name} with"
        yield Finding(file, "train-missing", why, "move the recipe to its task's folder")


def _strategy(script: BatchScript) -> Iterator[Finding]:
    value = script.variable("STRATEGY")
    file = str(script.path)
    if value not in ("", script.strategy) and "${STRATEGY" not in script.text:
        why = f"STRATEGY={value} cannot be overridden: {script.strategy} would not be used"
        yield Finding(file, "strategy", why, f"write STRATEGY=${{STRATEGY:-{value}}}")
    if not script.strategy:
        yield Finding(file, "strategy", "STRATEGY is not set", "write STRATEGY=${STRATEGY:-ddp}")
    elif not script.accelerate_config.is_file():
        why = f"STRATEGY {script.strategy}: there is no {script.accelerate_config}"
        known = ", ".join(sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml")))
        yield Finding(file, "strategy", why, f"write one of {known}, or the path of an Accelerate config")
    elif script.config and (entry := STRATEGIES.get(script.accelerate_config.stem.partition("_")[0])):
        refusal = entry.refusal_of(script.config)
        if refusal:
            yield Finding(file, "strategy", f"STRATEGY {script.strategy}: {refusal.why}", refusal.remedy)


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
        shown = ", ".join(map(str, problems))
        why, _, remedy = next(iter(problems.values())).partition("; ")
        why = f"nodes x processes per node = {shown} x {processes}: {why}"
        yield Finding(str(script.path), "no-plan", why, remedy)


def config_findings(path: Path, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what is wrong with a recipe or a DeepSpeed JSON, or with an Accelerate config and the JSON that it names.

    The file's suffix and content say which it is. `overrides` are for a recipe, such as `--batch.micro_batch_size 4`.

    Raises:
        UserError: The file cannot be read.
    """
    text = read_text(path)
    is_json = path.suffix == ".json"
    try:
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        why = f"not valid {'JSON' if is_json else 'YAML'}: {' '.join(str(error).split())}"
        yield Finding(str(path), "syntax", why, "correct it there or just before")
        return
    if not is_json:
        yield from _accelerate_findings(path, content)
    elif path.resolve().parent.name == "ds_configs" or (isinstance(content, dict) and "zero_optimization" in content):
        yield from _explained(path, "deepspeed-setting", deepspeed_config_problems(content))
    else:
        try:
            load_config(path, overrides)
        except ConfigError as error:
            place = COMMAND_LINE if error.source == COMMAND_LINE else path
            yield from _explained(place, "recipe", error.problems)


def _explained(file: Path | str, rule: str, problems: Iterable[str]) -> Iterator[Finding]:
    """Findings from problems in the form "key: why; remedy"."""
    for problem in problems:
        why, _, remedy = problem.partition("; ")
        yield Finding(str(file), rule, why, remedy or "correct it")


def _accelerate_findings(path: Path, config: object) -> Iterator[Finding]:
    """Yield what a launch would refuse, or silently do differently on several nodes."""
    if not isinstance(config, dict):
        yield Finding(str(path), "syntax", "not a mapping of keys to values", "copy one of recipes/accelerate_configs")
        return
    kind = config.get("distributed_type")
    settings = _settings(config)
    for setting in (PRECISION, *REFUSED) if kind == "FSDP" else (PRECISION, *REFUSED, UNLESS_FSDP):
        value = settings.get(setting.key)
        # Accelerate leaves out empty sections.
        if value not in (None, {}) and str(value).lower() not in setting.off:
            why = f"{setting.key}: it is {value}, but {setting.reason}"
            yield Finding(str(path), "recipe-setting", why, setting.remedy)
    if kind not in STARTS_PROCESSES:
        why = f"distributed_type: with {kind} one process is started, whatever num_processes says"
        yield Finding(str(path), "one-process", why, f"write {', '.join(STARTS_PROCESSES[:-1])} or DEEPSPEED")
    if settings.get("use_cpu"):
        why = "use_cpu: each process would train alone; without a GPU, processes run on the CPU anyway"
        yield Finding(str(path), "one-process", why, "remove it")
    version = settings.get("fsdp_version", 1)
    if kind == "FSDP" and str(version) != FSDP_VERSION:
        why = f"fsdp_version: it is {version}, but {NOT_FSDP2}"
        yield Finding(str(path), "fsdp-version", why, f"write fsdp_version: {FSDP_VERSION}")
    if kind == "DEEPSPEED":
        yield from _deepspeed_findings(path, settings)


def _deepspeed_findings(path: Path, settings: Mapping[str, Any]) -> Iterator[Finding]:
    launcher = settings.get("deepspeed_multinode_launcher", "pdsh")
    if launcher != "standard":
        why = f"on several nodes {launcher} would start its own processes over ssh, in addition to Slurm's"
        yield Finding(str(path), "deepspeed-launcher", why, "write deepspeed_multinode_launcher: standard")
    file = Path(str(settings.get("deepspeed_config_file")))
    if file.is_file():
        yield from config_findings(file)
    else:
        why = f"deepspeed_config_file: there is no file {file} in {Path.cwd()}"
        yield Finding(str(path), "deepspeed-config-missing", why, "write ds_configs/zero2.json, for example")


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings, under the names that Accelerate knows them by."""
    settings = dict(config)
    prefixes = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "deepspeed_config": "", "parallelism_config": ""}
    for section, prefix in prefixes.items():
        for key, value in (config.get(section) or {}).items():
            settings[prefix + key.removeprefix(prefix)] = value
    return settings
