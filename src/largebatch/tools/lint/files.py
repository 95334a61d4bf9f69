"""Selects the files to check, and checks them."""

from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.task_folders import recipes_in
from largebatch.tools.lint.config_rules import config_findings
from largebatch.tools.lint.findings import Finding
from largebatch.tools.lint.job import ACCELERATE_CONFIGS, SCRIPTS, Job, read_job
from largebatch.tools.lint.job_rules import job_findings
from largebatch.tools.lint.site import site_environment
from largebatch.tools.options import RECIPES


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
    scripts = [file for file in files if file.suffix == ".sbatch"]
    environment = site_environment() if scripts else {}
    jobs = [read_job(file, environment=environment) for file in scripts]
    configs = [file for file in files if file.suffix != ".sbatch"]
    return lint_jobs(jobs, configs)


def lint_jobs(jobs: Sequence[Job], configs: Sequence[Path] = ()) -> list[Finding]:
    """Check jobs, the files that they name, and other configs.

    Raises:
        UserError: A file cannot be read.
    """
    overrides: dict[Path, Sequence[str]] = dict.fromkeys(configs, ())
    for job in jobs:
        overrides |= {path: job.overrides for path in (job.recipe, job.accelerate_config) if path and path.is_file()}
    found = {finding for job in jobs for finding in job_findings(job)}
    found |= {finding for path, words in overrides.items() for finding in config_findings(path, words)}
    return sorted(found)
