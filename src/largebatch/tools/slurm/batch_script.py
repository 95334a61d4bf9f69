"""A batch script: its recipe, strategy and number of processes, and the environment that it is submitted in."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError
from largebatch.storage.run_folder import RunFolder
from largebatch.system.regular_file import read_bytes
from largebatch.tools.options import RECIPES

ACCELERATE_CONFIGS = RECIPES / "accelerate_configs"
SCRIPTS = Path("slurm")
PROFILE = SCRIPTS / "site.sh"
# The variables that a job sets for its own processes. They are left out, because this may be one of them.
OF_A_JOB = re.compile("LARGEBATCH_(JOB_ID|RESTART|JOB_END_TIME|NODE|NODE_NAMES|TOKEN|LOGS|BEGAN|SNAPSHOT)")
SETTING = re.compile("(SBATCH|LARGEBATCH|HF)_.*|STRATEGY|RUN_DIR")
# A last command that returns false, such as a test, is not a failure unless it prints an error.
SOURCE = 'bash -n "$1" && { source "$1" >/dev/null; printf "%s\\0" "$?"; env -0; }'
# The options of sbatch that are read here and that a variable of the environment can set, too.
IN_ENVIRONMENT = ("gpus-per-node", "gres", "job-name", "output")
OPTION = re.compile(r"--([a-z-]+)(?:=(.*))?", re.DOTALL)
OPTION_IN_SCRIPT = re.compile(r"^#SBATCH\s+--([a-z-]+)(?:[= ]\s*(\S+))?", re.MULTILINE)
NODES = re.compile(r"([1-9][0-9]{0,5})(?:-([1-9][0-9]{0,5}))?")
PROCESSES = re.compile(r"[0-9]{1,6}")
MAX_NODE_COUNTS = 512  # each of them gets a plan
GPUS = re.compile(r"(?:gpus-per-node=|gres=gpu:)(?:[\w.+-]+:)?([0-9]{1,6})")


@dataclass(frozen=True)
class BatchScript:
    """A batch script as it would be submitted, with the files that it names. Paths are relative to the current folder.

    Only the options of sbatch that the plan needs are read: from lines `#SBATCH --name=value`, from SBATCH_* variables
    of the environment, which override them, and from a command line, which overrides both. Slurm checks all others.
    """

    path: Path
    given_options: Sequence[str] = ()  # words for sbatch, each `--name` or `--name=value`
    overrides: Sequence[str] = ()  # words for the recipe, such as `--batch.micro_batch_size 4`
    environment: Mapping[str, str] = field(default_factory=dict)
    task: Path | None = None  # the folder of the recipe's task, if it was named

    @cached_property
    def text(self) -> str:
        """The script's content; UserError if it cannot be read."""
        return read_text(self.path)

    def variable(self, name: str) -> str:
        """A variable's value, or its default as in `${NAME:-value}`; "" if it is not set."""
        match = re.search(rf"^{name}=\"?(?:\$\{{{name}:-)?([^\s\"}};]*)", self.text, re.MULTILINE)
        return match[1] if match else ""

    @cached_property
    def options(self) -> Mapping[str, str]:
        """The values of sbatch's options by their names; "" for those without a value."""
        options = dict(OPTION_IN_SCRIPT.findall(self.text))
        for name in IN_ENVIRONMENT:
            variable = f"SBATCH_{name.replace('-', '_').upper()}"
            if variable in self.environment:
                options[name] = self.environment[variable]
        for word in self.given_options:
            if match := OPTION.fullmatch(word):
                options[match[1]] = match[2] or ""
        return options

    @cached_property
    def recipe(self) -> Path | None:
        """The recipe that the script names, if there is such a file."""
        path = Path(self.variable("RECIPE"))
        return path if path.is_file() else None

    @cached_property
    def config(self) -> RecipeConfig | None:
        """The recipe, if it is valid; its problems are findings of its own file."""
        try:
            return load_config(self.recipe, self.overrides, task=self.task) if self.recipe else None
        except ConfigError:
            return None

    @property
    def strategy(self) -> str:
        """The name of the Accelerate config, or its path; "" if it is not set."""
        return self.environment.get("STRATEGY") or self.variable("STRATEGY")

    @property
    def accelerate_config(self) -> Path:
        """The strategy's file, which may not exist."""
        return Path(self.strategy) if self.strategy.endswith(".yaml") else ACCELERATE_CONFIGS / f"{self.strategy}.yaml"

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs that the job asks for on each node, 0 for none; None if its options do not give a plain number."""
        gpus: int | None = 0
        for name, value in self.options.items():
            option = f"{name}={value}"
            if match := GPUS.fullmatch(option):
                return int(match[1])
            if option.startswith(("gpus", "gres=gpu")):
                gpus = None
        return gpus

    @property
    def layout(self) -> tuple[range, int] | None:
        """The numbers of nodes that the job may train on, and the processes on each; None if they cannot be read.

        One process per GPU or, if the job asks for no GPUs, per CPU, unless LARGEBATCH_PROCESSES_PER_NODE is set.
        """
        nodes = NODES.fullmatch(self.environment.get("LARGEBATCH_NODES") or self.options.get("nodes", "1"))
        given = self.environment.get("LARGEBATCH_PROCESSES_PER_NODE")
        processes = given or str(self.gpus_per_node or self.options.get("cpus-per-task", "1"))
        if nodes is None or not PROCESSES.fullmatch(processes) or (self.gpus_per_node is None and not given):
            return None
        counts = range(int(nodes[1]), int(nodes[2] or nodes[1]) + 1)
        return (counts, int(processes)) if len(counts) <= MAX_NODE_COUNTS else None

    @property
    def completed_steps(self) -> int:
        """The steps of the latest checkpoint in the run's folder. Batch sizes of earlier steps need not divide."""
        run = RunFolder(Path(self.environment.get("RUN_DIR") or f"runs/{self.path.stem}"))
        # A run may have been deleted, or never begun.
        with suppress(OSError):
            return run.checkpoint_step()
        return 0

    def log(self, job_id: str) -> str:
        """The log's file: that of `--output`, or Slurm's default, with the job's name and (an array's first) number."""
        first = re.split("[,%-]", self.options.get("array", ""))[0]
        name = self.options.get("job-name", self.path.name)
        values = {"%%": "%", "%x": name, "%j": job_id, "%A": job_id, "%a": first}
        output = self.options.get("output", "slurm-%A_%a.out" if first else "slurm-%j.out")
        path = re.sub("%.", lambda found: values.get(found[0], found[0]), output)
        return str(Path(self.options.get("chdir", ""), path))


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return read_bytes(path, follow_links=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}; run largebatch from the top of the repository") from None


def site_environment() -> dict[str, str]:
    """This process's variables, with the settings that slurm/site.sh exports, if there is one.

    Raises:
        UserError: The profile fails.
    """
    environment = {name: value for name, value in os.environ.items() if not OF_A_JOB.fullmatch(name)}
    if not PROFILE.is_file():
        return environment
    result = subprocess.run(
        ["bash", "-c", SOURCE, "bash", PROFILE],
        env=environment,
        capture_output=True,
        text=True,
        errors="surrogateescape",
    )
    code, _, variables = result.stdout.partition("\0")
    if result.returncode or (code != "0" and result.stderr):
        reason = result.stderr.strip() or f"it ended with exit code {result.returncode}"
        raise UserError(f"{Path.cwd() / PROFILE} fails: {reason}")
    pairs = (variable.partition("=") for variable in variables.split("\0"))
    return environment | {name: value for name, _, value in pairs if SETTING.fullmatch(name)}
