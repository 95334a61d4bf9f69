"""`largebatch new`: a recipe as the beginning of a repository of one's own."""

import shlex
import sys
from pathlib import Path

from largebatch.bundle import BundledJob, create_bundle


def new(folder: Path, recipe: str, strategy: str | None, vendor: bool) -> None:
    """Copy a recipe into a folder that stands alone, and print what can be done there at once.

    Raises:
        UserError: There is no such recipe or strategy, or the folder cannot be made.
    """
    job = BundledJob.find(recipe, strategy)
    create_bundle(folder, job, vendor)
    count = sum(path.is_file() for path in folder.rglob("*"))
    print(f"{folder}: {count} files, {job.recipe} under {job.strategy}; README.md says what to change first")
    print(f"\n  cd {shlex.quote(str(folder))}")
    environment = ""
    if vendor:
        # Else the package of this environment would go on being used.
        print("  python3 -m venv .venv && . .venv/bin/activate")
        print("  pip install -r requirements.txt && pip install --no-deps --editable .")
    elif (activate := Path(sys.prefix, "bin", "activate")).is_file():
        environment = f"LARGEBATCH_ENV={shlex.quote(str(activate))} "
    print("  largebatch lint")
    print(f"  {job.launch()}")
    print(f"  {environment}sbatch {job.script}")
