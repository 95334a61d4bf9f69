"""The job of a bundle: where its recipe is in this installation, and what the texts say of it."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import largebatch
from largebatch.config import RecipeConfig, load_config
from largebatch.config.data import HubOrLocal
from largebatch.errors import ConfigError, UserError, did_you_mean
from largebatch.plan import resolve
from largebatch.task_folders import recipes_in
from largebatch.tools.lint.job import Job
from largebatch.tools.lint.sbatch import read_script
from largebatch.tools.verify.tiny import tiny_data_overrides

PACKAGE = Path(largebatch.__file__).parent
LARGE_JOB = (8, 8)
"""Nodes, and GPUs of each."""


def shipped_folder() -> Path:
    """The folder of recipes/, slurm/ and ds_configs/: in the package where a wheel has put them (setup.py), and at the
    top of the checkout elsewhere.

    Raises:
        UserError: There are none.
    """
    for folder in (PACKAGE / "shipped", PACKAGE.parent.parent):
        if (folder / "recipes").is_dir():
            return folder
    raise UserError(f"{PACKAGE} has no recipes: install largebatch from its wheel, or from a whole checkout")


TEMPLATE = PACKAGE / "tools/new/templates/task"
"""The smallest complete task: a task's folder, with the batch script of its recipe."""


@dataclass(frozen=True)
class BundledJob:
    """A recipe of this installation as the one of a bundle, with the strategy that it is to run under."""

    source: Path  # the recipe's JSON file
    batch_script: Path  # the batch script that it is submitted with
    task: str  # name of the task's folder in the bundle
    name: str  # of the recipe there
    strategy: str  # name of the Accelerate config

    @classmethod
    def find(cls, recipe: str, strategy: str | None) -> "BundledJob":
        """The job of a shipped recipe, under its own strategy where none is given.

        Raises:
            UserError: There is no such recipe or strategy.
        """
        shipped = shipped_folder()
        task, _, name = recipe.removesuffix(".json").rpartition("/")
        recipes = {path.stem: path for path in recipes_in(shipped / "recipes")}
        if name not in recipes or task not in ("", recipes[name].parent.name):
            raise _no_such("recipe", recipe, name, recipes)
        script = shipped / "slurm" / f"{name}.sbatch"
        return cls(recipes[name], script, recipes[name].parent.name, name, _strategy(strategy, script))

    @classmethod
    def template(cls, task: str, strategy: str | None) -> "BundledJob":
        """The smallest complete task, under a name of one's own.

        Raises:
            UserError: The name cannot be one, or there is no such strategy.
        """
        if not re.fullmatch("[a-z][a-z0-9_]*", task) or task == "accelerate_configs":
            raise UserError(
                f"--task {task}: this is the name of a folder beside accelerate_configs and of a recipe; write small "
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
        """Its batch script, likewise."""
        return Path("slurm", f"{self.name}.sbatch")

    @cached_property
    def config(self) -> RecipeConfig:
        config: RecipeConfig = load_config(self.source)
        return config

    @property
    def data(self) -> str:
        """Where the data are, in a sentence."""
        data = self.config.data
        if not isinstance(data, HubOrLocal):
            return "Its data are there on every machine; nothing is downloaded."
        return (
            f"Its data are `{data.path}`, by Hugging Face `datasets`. The first start downloads them to `HF_HOME`; "
            "let that be a folder with room that all nodes share. Gated ones want their terms accepted, and `HF_TOKEN`."
        )

    def launch(self) -> str:
        """The command that trains it on this machine."""
        words = ["accelerate launch --config_file", f"recipes/accelerate_configs/{self.strategy}.yaml"]
        _, processes, _ = self._size_of_the_script
        words += ["--num_processes", str(processes), f"{self.recipe.parent}/train.py --config {self.recipe}"]
        return " ".join(words)

    def submit(self) -> str:
        """The command that shows and submits its job."""
        nodes, processes, on_gpus = self._size
        gpus = f" --gpus-per-node {processes}" if on_gpus else ""
        return f"largebatch submit {self.name} --nodes {nodes}{gpus}"

    def verify(self) -> str:
        """The command that compares strategies on a laptop."""
        tiny = " --tiny-data" if tiny_data_overrides(self.config) else ""
        # A small model enlarges the rounding of BatchNorm's sums over processes to what bf16 cannot tell from errors.
        finer = " --precision fp32" if tiny and self.config.model.synchronizes_batch_norm else ""
        return f"largebatch verify {self.recipe}{tiny} --world-sizes 2 --steps 5{finer}"

    @property
    def processes(self) -> int:
        """Of the whole job."""
        nodes, processes, _ = self._size
        return nodes * processes

    @cached_property
    def _size(self) -> tuple[int, int, bool]:
        """Nodes of the job, processes of each, and whether on GPUs: 64 of them where the batch divides over so many."""
        try:
            resolve(self.config, math.prod(LARGE_JOB))
        except ConfigError:
            return self._size_of_the_script
        return *LARGE_JOB, True

    @cached_property
    def _size_of_the_script(self) -> tuple[int, int, bool]:
        job = Job(read_script(self.batch_script))
        processes, option = job.processes_per_node()
        return job.node_counts()[-1], processes, option is not None and option.name == "gpus-per-node"


def _strategy(given: str | None, script: Path) -> str:
    """The strategy that is asked for, or else the script's."""
    strategy = Job(read_script(script)).strategy if given is None else given
    if strategy is None:
        raise UserError(f"{script} sets no STRATEGY; write STRATEGY=${{STRATEGY:-ddp}} there")
    configs = {path.stem: path for path in shipped_folder().glob("recipes/accelerate_configs/*.yaml")}
    if strategy not in configs:
        raise _no_such("strategy", strategy, strategy, configs)
    return strategy


def _no_such(what: str, given: str, name: str, known: Collection[str]) -> UserError:
    close = did_you_mean(name, sorted(known))
    return UserError(f"--{what} {given}: no such {what}{close}; write one of {', '.join(sorted(known))}")
