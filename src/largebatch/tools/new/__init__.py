"""`largebatch new`: copies a recipe, or the smallest task, into a new self-contained folder."""

import argparse
import re
import shutil
from dataclasses import dataclass
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
    original = smallest_task(options.task) if options.task else shipped_recipe(options.recipe)
    copies = _copies(original)
    texts = _texts(original)
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


@dataclass(frozen=True)
class Original:
    """The recipe in this installation that a project is made from."""

    recipe: Path  # its JSON file, in the folder of its task
    script: Path  # its batch script
    task: str  # name of the task's folder in the project
    name: str  # the recipe's name in the project


def shipped_recipe(name: str) -> Original:
    """A shipped recipe; UserError if there is no such recipe."""
    recipes = {path.stem: path for path in recipes_in(SHIPPED / "recipes")}
    if name not in recipes:
        close = did_you_mean(name, sorted(recipes))
        raise UserError(f"--recipe {name}: no such recipe{close}; write one of {', '.join(sorted(recipes))}")
    return Original(recipes[name], SHIPPED / "slurm" / f"{name}.sbatch", recipes[name].parent.name, name)


def smallest_task(name: str) -> Original:
    """The smallest complete task, under a name that the user chose; UserError if it is not a valid name."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or name == "accelerate_configs":
        raise UserError(
            f"--task {name}: this names a folder next to accelerate_configs, and a recipe; write lowercase letters, "
            "digits and _, such as my_task"
        )
    return Original(SMALLEST_TASK / "task.json", SMALLEST_TASK / "task.sbatch", name, name)


def _copies(original: Original) -> dict[str, Path]:
    """The files to copy, by their paths in the project."""
    copies = {str(path.relative_to(SHIPPED)): path for pattern in COPIED for path in SHIPPED.glob(pattern)}
    # The license of the copied files, not of the new repository.
    copies["LICENSE.largebatch"] = SHIPPED / "LICENSE"
    task = f"recipes/{original.task}"
    copies[f"slurm/{original.name}.sbatch"] = original.script
    for path in original.recipe.parent.iterdir():
        if path.suffix in (".py", ".md") or path.name == SCHEMA:
            copies[f"{task}/{path.name}"] = path
    return copies


class _Text(Template):
    # Dollar signs belong to shells.
    delimiter = "@"


def _texts(original: Original) -> dict[str, str]:
    """The project's own texts, by their paths."""
    script = BatchScript(original.script)
    assert script.layout is not None
    nodes = script.layout[0][-1]
    processes = script.layout[1]
    # The tested versions of what a run needs.
    tested = (SHIPPED / "requirements.txt").read_text(encoding="utf-8").partition("# Tests and checks")[0]
    values = {
        "version": largebatch.__version__,
        "name": original.name,
        "task": original.task,
        "recipe": f"recipes/{original.task}/{original.name}.json",
        "script": f"slurm/{original.name}.sbatch",
        "strategy": script.strategy,
        "nodes": nodes,
        "processes": processes,
        "world_size": nodes * processes,
        "pins": "\n".join(line for line in tested.splitlines() if "==" in line),
    }
    written = dict(WRITTEN)
    if original.recipe.parent == SMALLEST_TASK:
        # Its other files are complete; these have names to fill in.
        written[f"slurm/{original.name}.sbatch"] = "task/task.sbatch"
        written[f"recipes/{original.task}/README.md"] = "task/README.md"
    # What is made from a demonstration is none, so that its plan has notes.
    recipe = original.recipe.read_text(encoding="utf-8").replace('  "demonstration": true,\n', "")
    return {f"recipes/{original.task}/{original.name}.json": recipe} | {
        path: _Text((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
        for path, template in written.items()
    }
