"""A batch script with its options, recipe and strategy, and what a command line changes about them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError
from largebatch.tools.options import RECIPES
from largebatch.tools.slurm.findings import COMMAND_LINE, read_text
from largebatch.tools.slurm.sbatch import gpus, gpus_of_gres, node_counts, positive, read_environment, read_options

ACCELERATE_CONFIGS = RECIPES / "accelerate_configs"
SCRIPTS = Path("slurm")
GPU_OPTIONS = {"gpus-per-node": gpus, "gres": gpus_of_gres, "gpus-per-task": gpus}
"""The options that ask for GPUs, and how the number of their value is read."""


@dataclass(frozen=True)
class Option:
    """An option of sbatch under its long name; `line` is 0 for one on the command line or in the environment."""

    name: str
    value: str
    file: str
    line: int


@dataclass(frozen=True)
class BatchScript:
    """A batch script and the files that it names. Paths are relative to the current folder."""

    path: Path
    text: str
    options: Mapping[str, Option]  # those in force, by name
    overrides: Sequence[str] = ()  # words for the recipe, such as `--batch.micro_batch_size 4`
    given_strategy: str | None = None  # instead of the script's default
    given_nodes: int | None = None  # LARGEBATCH_NODES: the nodes to train on, of which the job may have more
    given_processes: int | None = None  # LARGEBATCH_PROCESSES_PER_NODE: instead of those that the options say

    def variable(self, name: str) -> tuple[str, int]:
        """A variable's value, or its default as in `${NAME:-value}`, and its line; "" and 1 if it is not set."""
        pattern = rf"""\s*(?:export\s+)?{name}=(["']?)(?:\$\{{{name}:?-)?(.*?)\}}?\1\s*(?:;.*|\s#.*)?"""
        matches = ((re.fullmatch(pattern, text), line) for line, text in enumerate(self.text.splitlines(), 1))
        return next(((match[2], line) for match, line in reversed([*matches]) if match), ("", 1))

    @cached_property
    def recipe(self) -> Path | None:
        """The recipe that the script names, if there is such a file."""
        path = Path(self.variable("RECIPE")[0])
        return path if path.is_file() else None

    @cached_property
    def config(self) -> RecipeConfig | None:
        """The recipe, if it is valid; its problems are findings of its own file."""
        try:
            return load_config(self.recipe, self.overrides) if self.recipe else None
        except ConfigError:
            return None

    @property
    def strategy(self) -> str:
        """The name of the Accelerate config, or its path; "" if it is not set."""
        return self.given_strategy or self.variable("STRATEGY")[0]

    @property
    def accelerate_config(self) -> Path:
        """The strategy's file, which may not exist."""
        return Path(self.strategy) if self.strategy.endswith(".yaml") else ACCELERATE_CONFIGS / f"{self.strategy}.yaml"

    @property
    def layout(self) -> tuple[range, int] | None:
        """The numbers of nodes that it may train on, and the processes on each; None if an option's value is invalid.

        One process per GPU or, if the job asks for no GPUs, per CPU, unless the number is given.
        """
        nodes = self.options.get("nodes")
        counts = node_counts(nodes.value) if nodes else range(1, 2)
        readers = GPU_OPTIONS | {"cpus-per-task": positive}
        processes = [read(self.options[name].value) for name, read in readers.items() if name in self.options]
        if counts is None or None in processes:
            return None
        if self.given_nodes:
            counts = range(self.given_nodes, self.given_nodes + 1)
        return counts, self.given_processes or next(filter(None, processes), 1)

    @property
    def asks_for_gpus(self) -> bool:
        """Whether its processes run on GPUs; otherwise they run on CPUs."""
        return any(read(self.options[name].value) for name, read in GPU_OPTIONS.items() if name in self.options)


def sbatch_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """The number of each `#SBATCH` line, its words, and whether Slurm reads it: only above the first command."""
    is_read = True
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            yield number, line.removeprefix("#SBATCH"), is_read
        elif line.strip() and not line.lstrip().startswith("#"):
            is_read = False


def read_script(
    path: Path,
    sbatch_options: Sequence[str] = (),
    overrides: Sequence[str] = (),
    strategy: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> BatchScript:
    """Read a batch script as it would be submitted with a command line's options of sbatch, overrides and strategy.

    SBATCH_* variables of the environment take precedence over the script, and the command line over both. How many
    nodes and processes train may be given by LARGEBATCH_NODES and LARGEBATCH_PROCESSES_PER_NODE, as slurm/launch.sh
    reads them.

    Raises:
        UserError: It cannot be read.
    """
    text, environment = read_text(path), environment or {}
    options = []
    for line, words, is_read in sbatch_lines(text):
        # sbatch itself refuses a quotation that is not closed.
        with suppress(ValueError):
            found = read_options(shlex.split(words, comments=True)) if is_read else ()
            options += [Option(name, value, str(path), line) for name, value in found]
    options += [Option(name, value, variable, 0) for variable, name, value in read_environment(environment)]
    options += [Option(name, value, COMMAND_LINE, 0) for name, value in read_options(sbatch_options)]
    by_name = {option.name: option for option in options if option.name}
    nodes, processes = (positive(environment.get(f"LARGEBATCH_{name}", "")) for name in ("NODES", "PROCESSES_PER_NODE"))
    return BatchScript(path, text, by_name, overrides, strategy, nodes, processes)


def log_path(script: BatchScript, option: Option | None, job_id: str = "%j") -> str:
    """The file of `--output` or `--error`, or Slurm's default, with the job's name and number filled in."""
    name, folder = script.options.get("job-name"), script.options.get("chdir")
    path = option.value if option else "slurm-%j.out"
    path = path.replace("%x", name.value if name else script.path.name).replace("%j", job_id)
    return str(Path(folder.value) / path if folder else path)
