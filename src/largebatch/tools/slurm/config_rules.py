"""Rules for a recipe's JSON, an Accelerate config and a DeepSpeed JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from largebatch.backend.deepspeed_config import deepspeed_config_problems
from largebatch.backend.launch import FSDP_VERSION, NOT_FSDP2, PRECISION, REFUSED, STARTS_PROCESSES, UNLESS_FSDP
from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.tools.slurm.findings import COMMAND_LINE, Finding, line_of, read_text


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
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", 1)
        language = "JSON" if is_json else "YAML"
        why = f"not valid {language}: {getattr(error, 'problem', None) or error}"
        yield Finding(str(path), line, f"{language.lower()}-syntax", why, "correct it here or just before")
        return
    if not is_json:
        yield from _accelerate_findings(path, text, content)
    elif path.resolve().parent.name == "ds_configs" or (isinstance(content, dict) and "zero_optimization" in content):
        yield from _explained(path, text, "deepspeed-setting", deepspeed_config_problems(content))
    else:
        try:
            load_config(path, overrides)
        except ConfigError as error:
            place = COMMAND_LINE if error.source == COMMAND_LINE else path
            yield from _explained(place, text, "recipe", error.problems)


def _explained(file: Path | str, text: str, rule: str, problems: Iterable[str]) -> Iterator[Finding]:
    """Findings from problems in the form "key: why; remedy"."""
    for problem in problems:
        why, _, remedy = problem.partition("; ")
        line = 0 if file == COMMAND_LINE else line_of(text, problem.partition(": ")[0])
        yield Finding(str(file), line, rule, why, remedy or "correct it")


def _accelerate_findings(path: Path, text: str, config: object) -> Iterator[Finding]:
    """Yield what a launch would refuse, or silently do differently on several nodes."""

    def finding(key: str, rule: str, why: str, remedy: str) -> Finding:
        return Finding(str(path), line_of(text, key), rule, f"{key}: {why}", remedy)

    if not isinstance(config, dict):
        yield finding(
            "the whole file", "yaml-syntax", "not a mapping of keys to values", "copy one of recipes/accelerate_configs"
        )
        return
    kind = config.get("distributed_type")
    if kind not in STARTS_PROCESSES:
        why = f"with {kind} one process is started, whatever num_processes says"
        yield finding("distributed_type", "one-process", why, f"write {', '.join(STARTS_PROCESSES[:-1])} or DEEPSPEED")
    if config.get("use_cpu"):
        why = "each process would train alone; without a GPU, processes run on the CPU anyway"
        yield finding("use_cpu", "one-process", why, "remove it")
    settings = _settings(config)
    if kind == "FSDP":
        version, key = settings.get("fsdp_version", (1, "fsdp_config.fsdp_version"))
        if str(version) != FSDP_VERSION:
            remedy = f"write fsdp_version: {FSDP_VERSION}"
            yield finding(key, "fsdp-version", f"it is {version}, but {NOT_FSDP2}", remedy)
        for name, (_, key) in settings.items():
            if key.startswith("parallelism_config.") and not name.startswith("parallelism_config_"):
                yield finding(key, "unknown-setting", "Accelerate ignores it", f"write parallelism_config_{name}")
    if kind == "DEEPSPEED":
        launcher, key = settings.get("deepspeed_multinode_launcher", ("pdsh", "deepspeed_config"))
        if launcher != "standard":
            why = f"on several nodes {launcher} would start its own processes over ssh, in addition to Slurm's"
            yield finding(key, "deepspeed-launcher", why, "write deepspeed_multinode_launcher: standard")
        file, key = settings.get("deepspeed_config_file", ("deepspeed_config_file", "deepspeed_config"))
        if Path(str(file)).is_file():
            yield from config_findings(Path(str(file)))
        else:
            why = f"there is no file {file} in {Path.cwd()}"
            remedy = (
                "write deepspeed_config_file: ds_configs/zero2.json, or another path from the top of the repository"
            )
            yield finding(key, "deepspeed-config-missing", why, remedy)
    for setting in (PRECISION, *REFUSED) if kind == "FSDP" else (PRECISION, *REFUSED, UNLESS_FSDP):
        value, key = settings.get(setting.key, (None, ""))
        # Accelerate leaves out empty sections.
        if value not in (None, {}) and str(value).lower() not in setting.off:
            yield finding(key, "recipe-setting", f"it is {value}, but {setting.reason}", setting.remedy)


def _settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Each setting under the name that Accelerate knows it by, with its value and the key it is written at."""
    settings = {str(name): (value, str(name)) for name, value in config.items()}
    prefixes = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "deepspeed_config": "", "parallelism_config": ""}
    for section, prefix in prefixes.items():
        inner = config.get(section)
        for key, value in inner.items() if isinstance(inner, dict) else ():
            settings[prefix + str(key).removeprefix(prefix)] = (value, f"{section}.{key}")
    return settings
