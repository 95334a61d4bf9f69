"""Selects the files to check, and checks them."""

from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.task_folders import recipes_in
from largebatch.tools.options import RECIPES
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, SCRIPTS, BatchScript
from largebatch.tools.slurm.config_rules import config_findings
from largebatch.tools.slurm.findings import Finding
from largebatch.tools.slurm.script_rules import script_findings
from largebatch.tools.slurm.site import site_environment


def files_of_repository() -> list[Path]:
    """All recipes, batch scripts of recipes, and configs below the current folder.

    Raises:
        UserError: There are none.
    """
    files = [
        *recipes_in(RECIPES),
        *(script for script in SCRIPTS.glob("*.sbatch") if script.name != "prepare.sbatch"),
        *ACCELERATE_CONFIGS.glob("*.yaml"),
        *Path("ds_configs").glob("*.json"),
    ]
    if not files:
        raise UserError(
            f"there are no recipes and scripts in {Path.cwd()}; go to the top of the repository, or name FILES"
        )
    return files


def lint_files(files: Sequence[Path]) -> list[Finding]:
    """Check recipes, batch scripts, Accelerate and DeepSpeed configs, and the files that they name.

    Raises:
        UserError: A file cannot be read, or is of an unknown kind.
    """
    for file in files:
        if file.suffix not in (".sbatch", ".json", ".yaml", ".yml"):
            raise UserError(
                f"{file}: not a file that can be checked; give recipes and DeepSpeed configs (.json), batch scripts "
                "(.sbatch) or Accelerate configs (.yaml)"
            )
    environment = site_environment() | {"STRATEGY": ""}
    scripts = [BatchScript.read(file, environment=environment) for file in files if file.suffix == ".sbatch"]
    return lint_scripts(scripts, [file for file in files if file.suffix != ".sbatch"])


def lint_scripts(scripts: Sequence[BatchScript], configs: Sequence[Path] = ()) -> list[Finding]:
    """Check batch scripts, the files that they name, and other configs.

    Raises:
        UserError: A file cannot be read.
    """
    overrides: dict[Path, Sequence[str]] = dict.fromkeys(configs, ())
    for script in scripts:
        named = (script.recipe, script.accelerate_config)
        overrides |= {path: script.overrides for path in named if path and path.is_file()}
    found = {finding for script in scripts for finding in script_findings(script)}
    found |= {finding for path, words in overrides.items() for finding in config_findings(path, words)}
    return sorted(found)
