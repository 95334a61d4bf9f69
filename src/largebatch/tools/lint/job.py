"""A job: a script with the recipe and the strategy it starts, and what a command line changes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError
from largebatch.tools.lint.sbatch import Option, Script, read_script
from largebatch.tools.lint.slurm_values import gpus, gpus_of_gres, node_counts

ACCELERATE_CONFIGS = Path("recipes/accelerate_configs")
SCRIPTS = Path("slurm")
LAUNCH = SCRIPTS / "launch.sh"


@dataclass(frozen=True)
class CommandLine:
    """What is changed of a job when it is submitted."""

    sbatch_options: Sequence[str] = ()  # words for sbatch, which win over the script's `#SBATCH` lines
    overrides: Sequence[str] = ()  # words for the recipe, such as `--batch.micro_batch_size 4`
    strategy: str | None = None  # instead of the script's default
    run_dir: Path | None = None  # folder of the run, instead of runs/<recipe>


@dataclass(frozen=True)
class Job:
    """A script and what it names, with the command line's values in force. Paths are relative to the current folder."""

    script: Script
    command_line: CommandLine = field(default_factory=CommandLine)

    @cached_property
    def recipe(self) -> Path | None:
        """The recipe that the script names, if there is such a file."""
        named = self.script.variable("RECIPE")
        path = Path(named.value) if named and named.value else None
        return path if path and path.is_file() else None

    @cached_property
    def config(self) -> RecipeConfig | None:
        """The recipe, if it is valid; what is not is found in its own file."""
        try:
            return load_config(self.recipe, self.command_line.overrides) if self.recipe else None
        except ConfigError:
            return None

    @property
    def strategy(self) -> str | None:
        """The name of the Accelerate config, or its path."""
        default = self.script.variable("STRATEGY")
        return self.command_line.strategy or (default.value if default else None)

    @property
    def accelerate_config(self) -> Path | None:
        """The strategy's file, if there is one."""
        if self.strategy is None:
            return None
        path = strategy_file(self.strategy)
        return path if path.is_file() else None

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run."""
        return self.command_line.run_dir or (Path("runs") / self.recipe.stem if self.recipe else None)

    # --- where it runs --------------------------------------------------------------------------------------------

    def node_counts(self) -> range:
        """The numbers of nodes it may get.

        Raises:
            ValueError: `--nodes` is no number of nodes.
        """
        option = self.script.option("nodes")
        return node_counts(option.value) if option else range(1, 2)

    def processes_per_node(self) -> tuple[int, Option | None]:
        """One process a GPU or, where none are asked for, a CPU; and the option that says how many.

        Raises:
            ValueError: The option is no number.
        """
        for name, count in (("gpus-per-node", gpus), ("gres", gpus_of_gres), ("gpus-per-task", gpus)):
            option = self.script.option(name)
            if option and (asked := count(option.value)):
                return asked, option
        option = self.script.option("cpus-per-task")
        if option and not (option.value.isdecimal() and int(option.value)):
            raise ValueError(f"{option.value!r} is no number of CPUs")
        return int(option.value) if option else 1, option


def strategy_file(strategy: str) -> Path:
    """The Accelerate config that a strategy is the name or the path of."""
    return Path(strategy) if strategy.endswith(".yaml") else ACCELERATE_CONFIGS / f"{strategy}.yaml"


def read_job(path: Path, command_line: CommandLine) -> Job:
    """Read an sbatch script with the values of a command line in force.

    Raises:
        UserError: It cannot be read.
    """
    return Job(read_script(path, command_line.sbatch_options), command_line)
