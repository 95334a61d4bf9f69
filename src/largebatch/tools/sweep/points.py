"""The points of a sweep, and what its folder says of them."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from largebatch.config import flatten, override_words, split_overrides
from largebatch.errors import UserError, file_errors, reason_of
from largebatch.storage.files import link_folder, remove_folder, replace_file, replace_json_file, write_file
from largebatch.storage.run_folder import RunFolder
from largebatch.system.failures import Kind
from largebatch.system.regular_file import read_bytes

SWEEP_FILE = "sweep.json"
POINTS = "points"
"""In the sweep's folder, a file for each point: its name and the words of its run, a line each, for slurm/launch.sh."""
BATCH = "batch.global_batch_size"
RATE = "learning_rate.base_lr"
MAX_POINTS = 1000
"""As Slurm's arrays have, unless the site allows more."""
IN_A_NAME = re.compile(r"[\w.+-]{1,40}")  # a value that may stand in the name of a folder


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str  # that of its run folder in the sweep's
    settings: dict[str, Any]  # the values of the swept fields, by dotted name
    seed: int
    overrides: list[str]  # of the recipe, in words of the run's command line


@dataclass(frozen=True)
class Sweep:
    """Runs of one recipe whose results are compared."""

    recipe: str  # its file
    content: dict[str, Any]  # the recipe's JSON
    # A point's index is its number in an array of jobs.
    points: Annotated[list[Point], Field(max_length=MAX_POINTS)]
    metric: str = "loss"  # in evaluations.jsonl
    higher_is_better: bool = False
    start: str | None = None  # the checkpoint that all points branch from; None if they train from the start

    @property
    def sign(self) -> int:
        """The metric is this times the loss."""
        return -1 if self.higher_is_better else 1

    @property
    def options(self) -> list[str]:
        """The words of each run besides its overrides: a branch differs from the run of its checkpoint in these."""
        changed = f"{BATCH},learning_rate,train.duration,optimizer.groups,seed"
        return [f"--allow-change={changed}"] if self.start else []

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """The sweep in a folder; UserError if its file cannot be used."""
        file = folder / SWEEP_FILE
        try:
            return TypeAdapter(cls).validate_json(read_bytes(file))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not a sweep's, or cannot be read: {reason_of(error)}") from None

    def continued(self, folder: Path) -> "Sweep":
        """This sweep, with the points first that a folder already has: jobs in the queue know them by their numbers.

        Raises:
            UserError: The folder holds something else.
        """
        if not any(folder.glob("[!.]*")):
            return self
        if not (folder / SWEEP_FILE).exists():
            raise UserError(f"--folder: {folder} holds files that are not a sweep's; choose another folder")
        before = self.read(folder)
        mine = {point.name: {*point.overrides} for point in self.points}
        if lacking := [point.name for point in before.points if point.name not in mine]:
            raise UserError(
                f"--folder: {folder} holds a sweep that also has {', '.join(lacking)}; list these, too, or choose "
                "another folder"
            )
        known = self._settings()
        changed = {name for name, value in before._settings().items() if value != known.get(name)}
        changed.update(*(mine[point.name] ^ {*point.overrides} for point in before.points))
        if changed:
            raise UserError(
                f"--folder: {folder} holds a sweep with other settings: {', '.join(sorted(changed))}; choose another "
                "folder"
            )
        return replace(self, points=list({point.name: point for point in [*before.points, *self.points]}.values()))

    def waiting(self, folder: Path) -> list[int]:
        """The numbers of the points that are not over."""
        return [number for number, point in enumerate(self.points) if not _is_done(folder / point.name)]

    def write(self, folder: Path) -> None:
        """Write what a folder says of the points, and make the run folders of branches.

        Raises:
            UserError: The folder cannot be written.
        """
        with file_errors(f"--folder: {folder} cannot be written", "choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            replace_json_file(folder / SWEEP_FILE, asdict(self))
            (folder / POINTS).mkdir(exist_ok=True)
            for number, point in enumerate(self.points):
                lines = [point.name, *self.options, *point.overrides, ""]
                replace_file(folder / POINTS / str(number), "\n".join(lines).encode())
        for point in self.points:
            if self.start and not (folder / point.name).exists():
                _branch_off(Path(self.start), folder / point.name)

    def _settings(self) -> dict[str, Any]:
        """What may not change besides the points, by dotted name."""
        return flatten({"recipe": self.content, "start": self.start})


def _is_done(run_dir: Path) -> bool:
    """Whether a run has finished, or has failed in a way in which it would fail again: its loss was not finite."""
    ending = RunFolder(run_dir).ending()
    return ending is not None and ending.kind in (Kind.FINISHED, Kind.TRAINING)


def _branch_off(checkpoint: Path, run_dir: Path) -> None:
    """Make the folder of a run that stands at a checkpoint of another run; they share its files.

    Raises:
        UserError: The file system does not allow this.
    """
    run = RunFolder(checkpoint.parent.parent)
    new = RunFolder(run_dir.with_name(f".{run_dir.name}.new"))
    try:
        remove_folder(new.path)
        link_folder(checkpoint, new.checkpoints_dir / checkpoint.name)
        for file in (run.plan_file, run.config_file):
            write_file(new.path / file.name, read_bytes(file))
        new.path.rename(run_dir)
    except OSError as error:
        raise UserError(
            f"{run_dir} cannot be made from {checkpoint}: {error}; its run must have a plan.json and a config.json, "
            "and --folder be on the same file system"
        ) from None


def grid(words: Sequence[str], seeds: int, seed: int = 0) -> list[Point]:
    """The points of all combinations of the values that overrides list, and of seeds.

    Args:
        words: Overrides. `1e-3,2e-3` lists numbers, and a JSON list any values; anything else is one value.
        seeds: Number of seeds; each of those given as `--seed`, or `seed`, is followed by the next ones.
        seed: The recipe's seed.

    Raises:
        ConfigError: A word is not an override.
        UserError: A list is empty, or has a value twice, or there are too many points.
    """
    values = {name: _values(name, text) for name, text in split_overrides(words)}
    seeds_given = values.pop("seed", [seed])
    check_number(seeds * math.prod(map(len, [seeds_given, *values.values()])))
    values["seed"] = [each + more if type(each) is int else each for each in seeds_given for more in range(seeds)]
    swept = [name for name, listed in values.items() if len(listed) > 1 and name != "seed"]
    points: dict[str, Point] = {}
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        shown = (f"{field.rpartition('.')[2]}={_shown(settings[field], values[field])}" for field in [*swept, "seed"])
        name = "_".join(shown)
        if name in points:
            raise UserError(f"{name}: a value is listed twice; list each once")
        points[name] = Point(name, {each: settings[each] for each in swept}, settings["seed"], override_words(settings))
    return list(points.values())


def check_number(points: int) -> None:
    """Raise UserError if a sweep would have too many points."""
    if points > MAX_POINTS:
        raise UserError(f"the sweep would have {points:,} points, at most {MAX_POINTS:,}; list fewer values or seeds")


def _values(name: str, text: str) -> list[Any]:
    is_list = text.lstrip().startswith("[")
    try:
        listed: list[Any] = json.loads(text if is_list else f"[{text}]")
    except (ValueError, RecursionError):
        return [text]
    if not listed:
        raise UserError(f"--{name} {text}: the list has no values; a value that is itself a list is written [[…]]")
    are_values = is_list or len(listed) == 1 or all(type(value) in (int, float) for value in listed)
    return listed if are_values else [text]


def _shown(value: Any, listed: list[Any]) -> str:
    return str(value) if IN_A_NAME.fullmatch(str(value)) else f"value{listed.index(value) + 1}"
