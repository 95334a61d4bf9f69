"""`largebatch new`: copies a recipe, or the smallest task, into a new self-contained folder."""

import argparse
import re
import shutil
from pathlib import Path
from string import Template

import largebatch
from largebatch.errors import UserError
from largebatch.task_folders import SCHEMA, recipes_in
from largebatch.tools.slurm.batch_script import ACCELERATE_CONFIGS, BatchScript

PACKAGE = Path(largebatch.__file__).parent
# The folder of recipes/, slurm/ and launch/: in a wheel, where setup.py has put them; else the checkout.
SHIPPED = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent.parent
TEMPLATES = Path(__file__).parent / "templates"
SMALLEST_TASK = TEMPLATES / "task"
COPIED = (
    "recipes/accelerate_configs/*.yaml",
    "ds_configs/*.json",
    "launch/*.*",
    "slurm/launch.sh",
    "slurm/steps.sh",
    "slurm/prepare.sbatch",
    "slurm/site.example.sh",
    "slurm/sites/*.sh",
)


EPILOG = """examples:
  largebatch new my_job --recipe gpt2_124m
  largebatch new my_job --task my_task"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to create")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--recipe", metavar="NAME", choices=sorted(_shipped_recipes()), help="a shipped recipe, such as gpt2_124m"
    )
    what.add_argument(
        "--task", metavar="NAME", help="the smallest complete task, on generated data, to start your own from"
    )


class _Text(Template):
    # Dollar signs belong to shells.
    delimiter = "@"


def run(options: argparse.Namespace) -> int:
    """Copy a recipe, and everything it needs to run, into a new self-contained folder: train.py, JSON, sbatch script,
    launch.sh, Accelerate and DeepSpeed configs, requirements and a README that says what to change first. All commands
    work there.
    """
    folder: Path = options.folder
    if options.task is not None:
        name = options.task
        # It names a folder and files.
        if not re.fullmatch("[a-z][a-z0-9_]*", name) or name == ACCELERATE_CONFIGS.name:
            options.refuse(f"--task {name}: write lowercase letters, digits and _, such as my_task")
        recipe = SMALLEST_TASK / "task.json"
        script = SMALLEST_TASK / "task.sbatch"
        task = name
    else:
        name = options.recipe
        recipe = _shipped_recipes()[name]
        script = SHIPPED / "slurm" / f"{name}.sbatch"
        task = recipe.parent.name
    files = _files(recipe, f"recipes/{task}")
    files[f"recipes/{task}/{name}.json"] = recipe
    files[f"slurm/{name}.sbatch"] = script
    values = _values(BatchScript(script)) | {"task": task, "name": name}
    try:
        folder.mkdir()
        for path, source in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            is_template = source.is_relative_to(TEMPLATES)
            if is_template or source == recipe:
                # A copy of a demonstration is not a demonstration: its plan has notes.
                text = source.read_text(encoding="utf-8").replace('  "demonstration": true,\n', "")
                target.write_text(_Text(text).substitute(values) if is_template else text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be created ({error.strerror or error}); remove what is there, or give another folder"
        ) from error
    print(f"created {folder}; its README.md says how to set it up, try it, train it, and what to change first")
    return 0


def _shipped_recipes() -> dict[str, Path]:
    """The files of the shipped recipes by their names."""
    return {path.stem: path for path in recipes_in(SHIPPED / "recipes")}


def _files(recipe: Path, task: str) -> dict[str, Path]:
    """The source of each file by its path in the project, but for the recipe and its script.

    Args:
        recipe: The recipe, whose task is copied.
        task: The folder of the task in the project.
    """
    files = {str(path.relative_to(SHIPPED)): path for pattern in COPIED for path in SHIPPED.glob(pattern)}
    for path in recipe.parent.iterdir():
        if path.suffix in (".py", ".md") or path.name == SCHEMA:
            files[f"{task}/{path.name}"] = path
    # The license of the copied files, not of the new repository.
    files["LICENSE.largebatch"] = SHIPPED / "LICENSE"
    files["README.md"] = TEMPLATES / "README.md"
    files["requirements.txt"] = TEMPLATES / "requirements.txt"
    files[".gitignore"] = TEMPLATES / "gitignore"
    return files


def _values(script: BatchScript) -> dict[str, str | int]:
    """What the templates say of a script, and of this version of largebatch."""
    assert script.layout is not None
    nodes, processes = script.layout
    # The tested versions of what a run needs.
    tested = (SHIPPED / "requirements.txt").read_text(encoding="utf-8").partition("# Tests and checks")[0]
    return {
        "version": largebatch.__version__,
        "pins": "\n".join(line for line in tested.splitlines() if "==" in line),
        "strategy": script.strategy,
        "nodes": nodes[-1],
        "processes": processes,
        "world_size": nodes[-1] * processes,
    }
