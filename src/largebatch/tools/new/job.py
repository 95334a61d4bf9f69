"""The job of a bundle: where its recipe is in this installation, and what the texts say about it."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import largebatch
from largebatch.config import RecipeConfig, load_config
from largebatch.errors import UserError, did_you_mean
from largebatch.task_folders import recipes_in
from largebatch.tools.slurm.batch_script import BatchScript
from largebatch.tools.verify.tiny import tiny_data_overrides

PACKAGE = Path(largebatch.__file__).parent
TEMPLATES = PACKAGE / "tools/new/templates"
TEMPLATE = TEMPLATES / "task"  # the smallest complete task: a task's folder, with the batch script of its recipe


def shipped_folder() -> Path:
    """The folder of recipes/, slurm/ and ds_configs/: in a wheel, where setup.py has put them; else the checkout's top.

    Raises:
        UserError: There is none.
    """
    for folder in (PACKAGE / "shipped", PACKAGE.parent.parent):
        if (folder / "recipes").is_dir():
            return folder
    raise UserError(f"{PACKAGE} has no recipes: install largebatch from its wheel, or from a whole checkout")


@dataclass(frozen=True)
class BundledJob:
    """The recipe of a bundle, as it is in this installation, with the strategy that it is to run under."""

    source: Path  # the recipe's JSON file
    batch_script: Path  # the batch script that it is submitted with
    task: str  # name of the task's folder in the bundle
    name: str  # the recipe's name in the bundle
    strategy: str  # name of the Accelerate config

    @classmethod
    def find(cls, recipe: str, strategy: str | None) -> "BundledJob":
        """The job of a shipped recipe; with None, under its script's strategy.

        Raises:
            UserError: There is no such recipe or strategy.
        """
        recipes = {path.stem: path for path in recipes_in(shipped_folder() / "recipes")}
        if recipe not in recipes:
            raise _no_such("recipe", recipe, recipes)
        script = shipped_folder() / "slurm" / f"{recipe}.sbatch"
        return cls(recipes[recipe], script, recipes[recipe].parent.name, recipe, _strategy(strategy, script))

    @classmethod
    def template(cls, task: str, strategy: str | None) -> "BundledJob":
        """The smallest complete task, under a name that the user chose.

        Raises:
            UserError: It is not a valid name, or there is no such strategy.
        """
        if not re.fullmatch("[a-z][a-z0-9_]*", task) or task == "accelerate_configs":
            raise UserError(
                f"--task {task}: this names a folder next to accelerate_configs, and a recipe; write lowercase "
                "letters, digits and _, such as my_task"
            )
        script = TEMPLATE / "task.sbatch"
        return cls(TEMPLATE / "task.json", script, task, task, _strategy(strategy, script))

    @property
    def is_template(self) -> bool:
        """Whether it is the smallest complete task, not a shipped recipe."""
        return self.source.parent == TEMPLATE

    @property
    def recipe(self) -> Path:
        """The recipe's file, from the top of the bundle."""
        return Path("recipes", self.task, f"{self.name}.json")

    @property
    def script(self) -> Path:
        """The batch script, from the top of the bundle."""
        return Path("slurm", f"{self.name}.sbatch")

    @cached_property
    def config(self) -> RecipeConfig:
        config: RecipeConfig = load_config(self.source)
        return config

    @cached_property
    def size(self) -> tuple[int, int]:
        """The largest number of nodes that the script asks for, and the processes on each."""
        layout = BatchScript.read(self.batch_script).layout
        assert layout is not None
        return layout[0][-1], layout[1]

    def launch(self) -> str:
        """The command that trains it on this machine."""
        config_file = f"recipes/accelerate_configs/{self.strategy}.yaml"
        script = f"{self.recipe.parent}/train.py --config {self.recipe}"
        return f"accelerate launch --config_file {config_file} --num_processes {self.size[1]} {script}"

    def submit(self) -> str:
        """The command that shows and submits its job."""
        return f"largebatch submit {self.name} --nodes {self.size[0]}"

    def verify(self) -> str:
        """The command that compares strategies on a laptop."""
        tiny = " --tiny-data" if tiny_data_overrides(self.config) else ""
        # A small model magnifies the rounding of BatchNorm's sums over processes; in bf16 it would look like errors.
        precision = " --precision fp32" if tiny and self.config.model.synchronizes_batch_norm else ""
        return f"largebatch verify {self.recipe}{tiny} --world-sizes 2 --steps 5{precision}"


def _strategy(given: str | None, script: Path) -> str:
    """The requested strategy, or else the script's."""
    strategy = BatchScript.read(script).strategy if given is None else given
    known = [path.stem for path in shipped_folder().glob("recipes/accelerate_configs/*.yaml")]
    if strategy not in known:
        raise _no_such("strategy", strategy, known)
    return strategy


def _no_such(what: str, given: str, known: Collection[str]) -> UserError:
    close = did_you_mean(given, sorted(known))
    return UserError(f"--{what} {given}: no such {what}{close}; write one of {', '.join(sorted(known))}")
