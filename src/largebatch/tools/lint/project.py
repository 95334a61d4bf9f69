"""Which files are checked by which rules."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from largebatch.errors import UserError
from largebatch.task_folders import recipes_in
from largebatch.tools.lint.config_rules import (
    accelerate_findings,
    deepspeed_findings,
    named_deepspeed_config,
    recipe_findings,
)
from largebatch.tools.lint.files import Finding, read_json
from largebatch.tools.lint.job import ACCELERATE_CONFIGS, LAUNCH, SCRIPTS, CommandLine, read_job
from largebatch.tools.lint.job_rules import job_findings
from largebatch.tools.lint.script_rules import script_findings, syntax_findings

DEEPSPEED_CONFIGS = Path("ds_configs")
RECIPES = Path("recipes")

Kind = Literal["script", "shell", "recipe", "accelerate", "deepspeed"]


@dataclass(frozen=True)
class Report:
    """What was found in how many files."""

    findings: list[Finding]
    files: int


def lint_repository() -> Report:
    """Check all recipes, scripts and configs below the current folder, and that recipes and scripts are pairs.

    Raises:
        UserError: There are none, or one cannot be read.
    """
    recipes = recipes_in(RECIPES)
    files = [
        *recipes,
        *sorted(SCRIPTS.glob("*.sbatch")),
        *sorted(ACCELERATE_CONFIGS.glob("*.yaml")),
        *sorted(DEEPSPEED_CONFIGS.glob("*.json")),
    ]
    if not files:
        raise UserError(
            f"there are no recipes and scripts in {Path.cwd()}; go to the top of the repository, or name FILES"
        )
    report = lint_files(files)
    return Report(_in_order([*report.findings, *_without_script(recipes)]), report.files)


def lint_files(files: Sequence[Path], command_line: CommandLine | None = None) -> Report:
    """Check recipes, sbatch scripts, Accelerate and DeepSpeed configs, and what they name.

    A script's job is checked as the command line would submit it.

    Raises:
        UserError: A file cannot be read, or is of no known kind.
    """
    command_line = command_line or CommandLine()
    checks = dict.fromkeys(check for file in files for check in _with_what_it_names(file, _kind(file), command_line))
    findings = [finding for path, kind in checks for finding in _findings(path, kind, command_line)]
    return Report(_in_order(findings), len(checks))


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(set(findings), key=lambda finding: (finding.file, finding.line, finding.rule, finding.why))


def _without_script(recipes: Sequence[Path]) -> Iterator[Finding]:
    for recipe in recipes:
        script = SCRIPTS / f"{recipe.stem}.sbatch"
        if not script.is_file():
            why = f"there is no {script}: a recipe is a JSON and an sbatch script of the same name"
            yield Finding(str(recipe), 1, "script-missing", why, "copy one of those that are there, and change it")


def _kind(path: Path) -> Kind:
    match path.suffix:
        case ".sbatch":
            return "script"
        case ".sh":
            return "shell"
        case ".yaml" | ".yml":
            return "accelerate"
        case ".json":
            return "deepspeed" if _is_deepspeed_config(path) else "recipe"
    raise UserError(
        f"{path}: not a file that can be checked; give recipes and DeepSpeed configs (.json), batch scripts "
        "(.sbatch, .sh) or Accelerate configs (.yaml)"
    )


def _is_deepspeed_config(path: Path) -> bool:
    read = read_json(path)
    config = None if isinstance(read, Finding) else read[1]
    has_zero = isinstance(config, dict) and "zero_optimization" in config
    return has_zero or path.resolve().parent.name == DEEPSPEED_CONFIGS.name


def _with_what_it_names(path: Path, kind: Kind, command_line: CommandLine) -> Iterator[tuple[Path, Kind]]:
    yield path, kind
    if kind == "script":
        if LAUNCH.is_file():
            yield LAUNCH, "shell"
        job = read_job(path, command_line)
        if job.recipe:
            yield job.recipe, "recipe"
        if job.accelerate_config:
            yield from _with_what_it_names(job.accelerate_config, "accelerate", command_line)
    elif kind == "accelerate" and (named := named_deepspeed_config(path)):
        yield named, "deepspeed"


def _findings(path: Path, kind: Kind, command_line: CommandLine) -> Iterator[Finding]:
    match kind:
        case "script":
            job = read_job(path, command_line)
            yield from syntax_findings(path)
            yield from script_findings(job.script)
            yield from job_findings(job)
        case "shell":
            yield from syntax_findings(path)
        case "recipe":
            yield from recipe_findings(path, command_line.overrides)
        case "accelerate":
            yield from accelerate_findings(path)
        case "deepspeed":
            yield from deepspeed_findings(path)
