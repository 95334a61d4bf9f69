"""`largebatch snapshot`: a copy of what a job runs, which later edits of the repository do not change."""

import argparse
from pathlib import Path

from largebatch.config import task_of
from largebatch.storage.source_code import take_snapshot
from largebatch.tools.options import recipe_file

EPILOG = """examples:
  largebatch snapshot --to snapshots/monday

submit takes a snapshot for each job; for a job that was submitted by sbatch, its first start takes one."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=recipe_file, nargs="?", help="the recipe that the job trains")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to create")


def run(options: argparse.Namespace) -> int:
    """Copy recipes, their code, Accelerate and DeepSpeed configs, scripts, and the package if it is in the repository,
    from the current folder to another one, which is complete or absent. Its git.json names the commit. Data and runs
    are left out. An existing snapshot is left as it is. A RECIPE from elsewhere is copied into its task's folder.
    """
    take_snapshot(Path(), options.to, options.recipe, options.recipe and task_of(options.recipe))
    return 0
