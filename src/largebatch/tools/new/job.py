"""The job of a bundle: where its recipe is in this installation, and what the texts say of it."""

import math
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


@dataclass(frozen=True)
class BundledJob:
    """A shipped recipe with the strategy that it is to run under."""

    source: Path  # the recipe's JSON file
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
        if strategy is None and (strategy := Job(read_script(script)).strategy) is None:
            raise UserError(f"{script} sets no STRATEGY; write STRATEGY=${{STRATEGY:-ddp}} there")
        configs = {path.stem: path for path in shipped.glob("recipes/accelerate_configs/*.yaml")}
        if strategy not in configs:
            raise _no_such("strategy", strategy, strategy, configs)
        return cls(recipes[name], strategy)

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def task(self) -> str:
        return self.source.parent.name

    @property
    def recipe(self) -> Path:
        """The recipe's file, from the top of the bundle."""
        return Path("recipes", self.task, self.source.name)

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
            return "Its data come with Python's packages; nothing is downloaded."
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
        finer = " --precision fp32" if tiny and self.config.model.synchronises_batch_norm else ""
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
        job = Job(read_script(shipped_folder() / self.script))
        processes, option = job.processes_per_node()
        return job.node_counts()[-1], processes, option is not None and option.name == "gpus-per-node"


def _no_such(what: str, given: str, name: str, known: Collection[str]) -> UserError:
    close = did_you_mean(name, sorted(known))
    return UserError(f"--{what} {given}: no such {what}{close}; write one of {', '.join(sorted(known))}")
