"""`largebatch new`: copies a recipe, or the smallest task, into a new self-contained folder."""

import argparse
import re
import shutil
from pathlib import Path
from string import Template

import largebatch
from largebatch.errors import UserError
from largebatch.task_folders import SCHEMA, recipes_in
from largebatch.tools.options import Commands, add_command
from largebatch.tools.slurm.batch_script import BatchScript
from largebatch.words import did_you_mean

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
WRITTEN = {
    "README.md": "README.md",
    "requirements.txt": "requirements.txt",
    ".gitignore": "gitignore",
}
"""The templates of a project's own files."""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "new",
        run,
        description="Copy a recipe, and everything it needs to run, into a new self-contained folder: train.py, JSON, "
        "sbatch script, launch.sh, Accelerate and DeepSpeed configs, requirements and a README that says what to "
        "change first. All commands work there.",
        epilog="""examples:
  largebatch new my_job --recipe gpt2_124m
  largebatch new my_job --task my_task""",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to create")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", metavar="NAME", help="a shipped recipe, such as gpt2_124m")
    smallest = "the smallest complete task, on generated data, to start your own from"
    what.add_argument("--task", metavar="NAME", help=smallest)


def run(options: argparse.Namespace) -> int:
    """Create a folder in the layout of this repository, with a recipe and everything it needs to run."""
    folder: Path = options.folder
    name = options.task or options.recipe
    if options.task:
        _check_task_name(name)
        recipe = SMALLEST_TASK / "task.json"
        script = SMALLEST_TASK / "task.sbatch"
        task = name
    else:
        recipe = _shipped_recipe(name)
        script = SHIPPED / "slurm" / f"{name}.sbatch"
        task = recipe.parent.name
    copies = _copies(recipe, f"recipes/{task}") | {f"slurm/{name}.sbatch": script}
    texts = _texts(recipe, script, task, name)
    try:
        folder.mkdir()
        for path, source in copies.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / path)
        for path, text in texts.items():
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{folder} cannot be created ({error.strerror or error})"
        raise UserError(f"{problem}; remove what is there, or give another folder") from error
    print(f"created {folder}; its README.md says how to set it up, try it, train it, and what to change first")
    return 0


def _shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe; UserError if there is no such recipe."""
    recipes = {path.stem: path for path in recipes_in(SHIPPED / "recipes")}
    if name not in recipes:
        close = did_you_mean(name, sorted(recipes))
        raise UserError(f"--recipe {name}: no such recipe{close}; write one of {', '.join(sorted(recipes))}")
    return recipes[name]


def _check_task_name(name: str) -> None:
    """Raise UserError if a name that the user chose is not a valid one."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name == "accelerate_configs":
        raise UserError(
            f"--task {name}: this names a folder next to accelerate_configs, and a recipe; write lowercase letters, "
            "digits and _, such as my_task"
        )


def _copies(recipe: Path, task: str) -> dict[str, Path]:
    """The files to copy, by their paths in the project; those of the recipe's task into the folder `task`."""
    copies = {str(path.relative_to(SHIPPED)): path for pattern in COPIED for path in SHIPPED.glob(pattern)}
    # The license of the copied files, not of the new repository.
    copies["LICENSE.largebatch"] = SHIPPED / "LICENSE"
    for path in recipe.parent.iterdir():
        if path.suffix in (".py", ".md") or path.name == SCHEMA:
            copies[f"{task}/{path.name}"] = path
    return copies


class _Text(Template):
    # Dollar signs belong to shells.
    delimiter = "@"


def _texts(recipe: Path, script: Path, task: str, name: str) -> dict[str, str]:
    """The project's own texts, by their paths; `task` and `name` are those of the recipe in the project."""
    job = BatchScript(script)
    assert job.layout is not None
    nodes = job.layout[0][-1]
    processes = job.layout[1]
    # The tested versions of what a run needs.
    tested = (SHIPPED / "requirements.txt").read_text(encoding="utf-8").partition("# Tests and checks")[0]
    values = {
        "version": largebatch.__version__,
        "name": name,
        "task": task,
        "recipe": f"recipes/{task}/{name}.json",
        "script": f"slurm/{name}.sbatch",
        "strategy": job.strategy,
        "nodes": nodes,
        "processes": processes,
        "world_size": nodes * processes,
        "pins": "\n".join(line for line in tested.splitlines() if "==" in line),
    }
    written = dict(WRITTEN)
    if recipe.parent == SMALLEST_TASK:
        # Its other files are complete; these have names to fill in.
        written[f"slurm/{name}.sbatch"] = "task/task.sbatch"
        written[f"recipes/{task}/README.md"] = "task/README.md"
    # What is made from a demonstration is none, so that its plan has notes.
    content = recipe.read_text(encoding="utf-8").replace('  "demonstration": true,\n', "")
    return {f"recipes/{task}/{name}.json": content} | {
        path: _Text((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
        for path, template in written.items()
    }
