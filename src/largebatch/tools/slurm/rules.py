"""Rules for recipes, Accelerate and DeepSpeed configs, and for batch scripts with the recipe and strategy they name."""

import ast
import json
import os
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from largebatch.backend.deepspeed_config import deepspeed_config_problems
from largebatch.backend.launch import FSDP_VERSION, NOT_FSDP2, STARTS_PROCESSES, refused_settings
from largebatch.config import load_config, task_of
from largebatch.errors import ConfigError
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, BatchScript, read_text
from largebatch.words import did_you_mean


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a file."""

    file: str  # the file, as it was named, or "the command line"
    rule: str  # the rule's name
    message: str  # what was found, why it is wrong, and what to write instead

    def __str__(self) -> str:
        return f"{self.file}: {self.message} [{self.rule}]"


def script_findings(script: BatchScript) -> Iterator[Finding]:
    """Yield what is wrong with a batch script, except for its options, which sbatch checks."""
    rules = {"recipe": _recipe(script), "strategy": _strategy(script), "no-plan": _plan(script)}
    for rule, messages in rules.items():
        for message in messages:
            yield Finding(str(script.path), rule, message)


def _recipe(script: BatchScript) -> Iterator[str]:
    name = script.path.stem
    value = script.variable("RECIPE")
    if script.recipe is None or script.recipe.stem != name:
        yield (
            f"RECIPE is {value or 'not set'}, and not a file of the script's name in {Path.cwd()}; write "
            f"RECIPE=recipes/TASK/{name}.json, the path from the top of the repository, or rename the script"
        )
    elif script.config and not (train := script.config.task_folder() / "train.py").is_file():
        yield f"there is no {train} to train {script.recipe.name} with; write one, or name the recipe's own task"


def _strategy(script: BatchScript) -> Iterator[str]:
    if not script.accelerate_config.is_file():
        known = ", ".join(sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml")))
        yield (
            f"STRATEGY is {script.strategy or 'not set'}: there is no {script.accelerate_config}; write "
            f"STRATEGY=${{STRATEGY:-ddp}}, with one of {known}, or the path of an Accelerate config"
        )
    elif script.config and (entry := STRATEGIES.get(script.accelerate_config.stem.partition("_")[0])):
        refusal = entry.refusal_of(script.config)
        if refusal:
            yield f"STRATEGY {script.strategy}: {refusal}"


def _plan(script: BatchScript) -> Iterator[str]:
    """The batch must divide for every number of nodes that the job may get."""
    if script.config is None or script.layout is None:
        return
    node_counts, processes = script.layout
    for nodes in node_counts:
        try:
            resolve(script.config, nodes * processes, completed_steps=script.completed_steps)
        except ConfigError as error:
            yield f"nodes x processes per node = {nodes} x {processes}: {error.problems[0]}"
            return


def config_findings(path: Path, overrides: Sequence[str] = (), task: Path | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a recipe or a DeepSpeed JSON, or with an Accelerate config and the JSON that it names.

    The file's suffix and content say which it is. `overrides` are for a recipe, such as `--batch.micro_batch_size 4`.

    Raises:
        UserError: The file cannot be read.
    """
    file = str(path)
    text = read_text(path)
    is_json = path.suffix == ".json"
    try:
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        yield Finding(file, "syntax", f"not valid {'JSON' if is_json else 'YAML'}: {' '.join(str(error).split())}")
        return
    if not isinstance(content, dict):
        yield Finding(file, "syntax", "not a mapping of keys to values; copy a shipped file, and change it")
    elif not is_json:
        for message in _accelerate_problems(content):
            yield Finding(file, "accelerate-setting", message)
        deepspeed_config = Path(str(_settings(content).get("deepspeed_config_file")))
        if deepspeed_config.is_file():
            yield from config_findings(deepspeed_config)
    elif path.resolve().parent.name == "ds_configs" or "zero_optimization" in content:
        for problem in deepspeed_config_problems(content):
            yield Finding(file, "deepspeed-setting", problem)
    else:
        try:
            # Before config.py is run, which may have such an import.
            for each in sorted(task_of(path, task).glob("*.py")):
                for problem in _missing_imports(each):
                    yield Finding(os.path.relpath(each), "import", problem)
            load_config(path, overrides, task=task)
        except ConfigError as error:
            for problem in error.problems:
                yield Finding(error.source or file, "recipe", problem)


def _missing_imports(file: Path) -> Iterator[str]:
    """Yield each import of a name that largebatch does not have. Nothing is imported; files that are not valid Python
    have none."""
    try:
        tree = ast.parse(read_text(file))
    except (SyntaxError, ValueError, RecursionError):
        return
    for statement in ast.walk(tree):
        module = getattr(statement, "module", None) or ""
        if not isinstance(statement, ast.ImportFrom) or statement.level or module.partition(".")[0] != "largebatch":
            continue
        known = _names_of(module)
        for name in (alias.name for alias in statement.names):
            if name not in known:
                close = did_you_mean(name, sorted(known))
                yield (
                    f"line {statement.lineno}: largebatch has no {module}.{name}{close}; CHANGELOG.md says under "
                    '"Renamed" what to write instead'
                )


@cache
def _names_of(module: str) -> frozenset[str]:
    """The names that can be imported from a module of largebatch: what it defines or imports, and its parts."""
    path = Path(__file__).parents[3].joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset()
    symbols = symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec").get_symbols()
    defined = (symbol.get_name() for symbol in symbols if symbol.is_local())
    return frozenset({"*", *defined, *(each.stem for each in path.glob("*"))})


def _accelerate_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a launch would refuse, ignore, or silently do differently on several nodes."""
    settings = _settings(config)
    kind = settings.get("distributed_type")
    for setting in refused_settings(is_fsdp=kind == "FSDP"):
        value = settings.get(setting.key)
        # Accelerate leaves out empty sections.
        if value not in (None, {}) and str(value).lower() not in setting.off:
            yield f"{setting.key}: it is {value}; remove it; {setting.why}"
    if kind not in STARTS_PROCESSES:
        yield (
            f"distributed_type: with {kind} one process is started, whatever num_processes says; write one of "
            f"{', '.join(STARTS_PROCESSES)}"
        )
    if settings.get("use_cpu"):
        yield "use_cpu: each process would train alone; without a GPU, processes run on the CPU anyway; remove it"
    version = settings.get("fsdp_version", 1)
    if kind == "FSDP" and str(version) != FSDP_VERSION:
        yield f"fsdp_version: it is {version}, but {NOT_FSDP2}; write fsdp_version: {FSDP_VERSION}"
    if kind == "DEEPSPEED":
        file = settings.get("deepspeed_config_file")
        if not Path(str(file)).is_file():
            yield f"deepspeed_config_file: there is no file {file} in {Path.cwd()}; write one of ds_configs"
        launcher = settings.get("deepspeed_multinode_launcher", "pdsh")
        if launcher != "standard":
            yield (
                f"deepspeed_multinode_launcher: on several nodes {launcher} would start its own processes over ssh, in "
                "addition to Slurm's; write standard"
            )
    sharding = config.get("parallelism_config")
    if isinstance(sharding, dict):
        for key in sharding:
            if not str(key).startswith("parallelism_config_"):
                yield f"parallelism_config.{key}: Accelerate ignores it; write parallelism_config_{key}"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings, under the names that Accelerate knows them by."""
    settings = dict(config)
    prefixes = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "deepspeed_config": "", "parallelism_config": ""}
    for section, prefix in prefixes.items():
        inner = config.get(section)
        if isinstance(inner, dict):
            for key, value in inner.items():
                settings[prefix + str(key).removeprefix(prefix)] = value
    return settings
