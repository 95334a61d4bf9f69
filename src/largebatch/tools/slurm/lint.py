"""`largebatch lint`: mistakes in the files of a job, found without a GPU, a cluster or torch."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.task_folders import recipes_in
from largebatch.tools.options import RECIPES, add_task, recipe_file
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, SCRIPTS, BatchScript
from largebatch.tools.slurm.rules import Finding, config_findings, script_findings
from largebatch.words import counted

EPILOG = """examples:
  largebatch lint
  largebatch lint slurm/gpt2_124m.sbatch"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        type=recipe_file,
        nargs="*",
        metavar="FILES",
        help="what to check, with the files that they name, or names of recipes; default: the current folder's "
        "repository",
    )
    add_task(parser)


def run(options: argparse.Namespace) -> int:
    """Check recipes, batch scripts, Accelerate and DeepSpeed configs against each other, without a GPU, a cluster or
    torch. Each finding names the file, what is wrong, what to write instead, and the rule. Exit code 1 if there are
    any. Options of sbatch are not checked: submit --dry-run asks Slurm.
    """
    files = options.files or files_of_repository()
    task = options.task
    findings = lint((BatchScript(file, task=task) if file.suffix == ".sbatch" else file for file in files), task)
    for finding in findings:
        print(finding)
    print(f"{counted(len(files), 'file')} checked, {counted(len(findings), 'problem')}")
    return 1 if findings else 0


def files_of_repository() -> list[Path]:
    """All recipes, batch scripts of recipes, and configs below the current folder.

    Raises:
        UserError: There are none.
    """
    scripts = [script for script in SCRIPTS.glob("*.sbatch") if script.name != "prepare.sbatch"]
    configs = [*ACCELERATE_CONFIGS.glob("*.yaml"), *Path("ds_configs").glob("*.json")]
    files = [*recipes_in(RECIPES), *scripts, *configs]
    if not files:
        raise UserError(f"no recipes and scripts are in {Path.cwd()}; go to the top of the repository, or name FILES")
    return files


def lint(files: Iterable[Path | BatchScript], task: Path | None = None) -> list[Finding]:
    """Check recipes, of the task if they are elsewhere, Accelerate and DeepSpeed configs, and scripts with what they
    name.

    Raises:
        UserError: A file cannot be read.
    """
    found: set[Finding] = set()
    configs: dict[Path, Sequence[str]] = {}
    for file in files:
        if isinstance(file, BatchScript):
            found.update(script_findings(file))
            named = (file.recipe, file.accelerate_config)
            configs |= {path: file.overrides for path in named if path and path.is_file()}
        else:
            configs.setdefault(file, ())
    for path, overrides in configs.items():
        found.update(config_findings(path, overrides, task))
    return sorted(found)
