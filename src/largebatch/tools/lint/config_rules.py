"""Rules for a recipe's JSON, an Accelerate config and a DeepSpeed JSON."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from largebatch.backend.deepspeed_config import deepspeed_config_problems
from largebatch.backend.launch import FSDP_VERSION, NOT_FSDP2, PRECISION, REFUSED, STARTS_PROCESSES
from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.tools.lint.files import COMMAND_LINE, Finding, KeyLines, read_json, read_text

Problem = tuple[str, str, str, str]
"""Key, rule, why and remedy."""


def recipe_findings(path: Path, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """What is wrong with a recipe, with the command line's overrides in force.

    Raises:
        UserError: It cannot be read.
    """
    read = read_json(path)
    if isinstance(read, Finding):
        yield read
        return
    text, raw = read
    lines = KeyLines(text)
    try:
        load_config(path, overrides)
    except ConfigError as error:
        for problem in error.problems:
            what, _, remedy = problem.partition("; ")
            line = lines.of(problem.partition(": ")[0])
            file, line = (COMMAND_LINE, 0) if error.source == COMMAND_LINE else (str(path), line)
            yield Finding(file, line, "recipe", what, remedy or "correct it")
    schema = raw.get("$schema") if isinstance(raw, dict) else None
    if isinstance(schema, str) and "://" not in schema and not (path.parent / schema).is_file():
        why = f"$schema: there is no file {schema} beside it, and editors check nothing"
        yield Finding(
            str(path),
            lines.of("$schema"),
            "schema-missing",
            why,
            'write "recipe.schema.json", and make it by largebatch schema',
        )


def deepspeed_findings(path: Path) -> Iterator[Finding]:
    """What in a DeepSpeed JSON contradicts that the recipe alone decides the optimization.

    Raises:
        UserError: It cannot be read.
    """
    read = read_json(path)
    if isinstance(read, Finding):
        yield read
        return
    text, config = read
    lines = KeyLines(text)
    for problem in deepspeed_config_problems(config):
        key = problem.partition(": ")[0]
        why, _, remedy = problem.partition("; ")
        if why == f"{key}: remove it":
            why, remedy = f"{key}: {remedy}", "remove it"
        yield Finding(str(path), lines.of(key), "deepspeed-setting", why, remedy or "correct it")


def accelerate_findings(path: Path) -> Iterator[Finding]:
    """What in an Accelerate config a launch would refuse, or silently do otherwise on several nodes.

    Raises:
        UserError: It cannot be read.
    """
    text = read_text(path)
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        why = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        yield Finding(str(path), mark.line + 1 if mark else 1, "yaml-syntax", why, "correct it here or just before")
        return
    if not isinstance(config, dict):
        yield Finding(str(path), 1, "yaml-syntax", "not a mapping of keys to values", "take recipes/accelerate_configs")
        return
    lines = KeyLines(text)
    for key, rule, why, remedy in _accelerate_problems(path, config):
        yield Finding(str(path), lines.of(key), rule, f"{key}: {why}", remedy)


def named_deepspeed_config(path: Path) -> Path | None:
    """The DeepSpeed JSON that an Accelerate config names, if there is such a file."""
    try:
        config = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError):
        return None
    file = _section(config, "deepspeed_config").get("deepspeed_config_file")
    return Path(file) if isinstance(file, str) and Path(file).is_file() else None


def _section(config: object, name: str) -> Mapping[str, Any]:
    section = config.get(name) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _accelerate_problems(path: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    kind = config.get("distributed_type")
    if kind not in STARTS_PROCESSES:
        why = f"with {kind} one process is started, whatever num_processes says"
        yield "distributed_type", "one-process", why, f"write {', '.join(STARTS_PROCESSES[:-1])} or DEEPSPEED"
    if config.get("use_cpu"):
        why = "the processes would each train alone; without a GPU they run on the CPU as they are"
        yield "use_cpu", "one-process", why, "remove it"
    settings = _settings(config)
    if kind == "FSDP":
        version, key = settings.get("fsdp_version", (1, "fsdp_config.fsdp_version"))
        if str(version) != FSDP_VERSION:
            yield key, "fsdp-version", f"it is {version}, and {NOT_FSDP2}", f"write fsdp_version: {FSDP_VERSION}"
    if kind == "DEEPSPEED":
        yield from _deepspeed_problems(path, _section(config, "deepspeed_config"))
    for setting in (PRECISION, *REFUSED):
        value, key = settings.get(setting.key, (None, ""))
        # Accelerate leaves out empty sections.
        if value not in (None, {}) and str(value).lower() not in setting.off:
            yield key, "recipe-setting", f"it is {value}, and {setting.reason}", setting.remedy


def _settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Each setting under the name that Accelerate knows it by, with its value and the key it is written at."""
    settings = {str(name): (value, str(name)) for name, value in config.items()}
    for name in list(settings):
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}.get(name, "")
        for key, value in _section(config, name).items():
            settings[prefix + str(key).removeprefix(prefix)] = (value, f"{name}.{key}")
    return settings


def _deepspeed_problems(path: Path, section: Mapping[str, Any]) -> Iterator[Problem]:
    key = "deepspeed_config.deepspeed_multinode_launcher"
    launcher = section.get("deepspeed_multinode_launcher", "pdsh")
    if launcher != "standard":
        why = f"on several nodes {launcher} would start processes of its own, over ssh, beside Slurm's"
        yield key, "deepspeed-launcher", why, "write deepspeed_multinode_launcher: standard"
    key = "deepspeed_config.deepspeed_config_file"
    file = section.get("deepspeed_config_file", "none")
    if file == "none":
        yield key, "deepspeed-config-missing", "there is none", "write one such as ds_configs/zero2.json"
    elif not Path(str(file)).is_file():
        why = f"there is no file {file} in {Path.cwd()}"
        yield key, "deepspeed-config-missing", why, "write the path from the top of the repository"
    else:
        said, stage = re.search(r"zero([123])", path.stem), _stage(Path(str(file)))
        if said and stage in (1, 2, 3) and stage != int(said[1]):
            why = f"{path.name} is ZeRO-{said[1]} by its name, {file} has stage {stage}"
            yield key, "stage-differs", why, f"name the config of stage {said[1]}"


def _stage(path: Path) -> object:
    read = read_json(path)
    return None if isinstance(read, Finding) else _section(read[1], "zero_optimization").get("stage")
