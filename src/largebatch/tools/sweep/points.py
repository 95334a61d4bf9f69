"""The points of a sweep, and the file in its folder that says what they are."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from largebatch.config import flatten, override_words, split_overrides
from largebatch.errors import UserError, file_errors
from largebatch.regular_file import read_bytes
from largebatch.storage.files import replace_json_file

SWEEP_FILE = "sweep.json"
BATCH, RATE = "batch.global_batch_size", "learning_rate.base_lr"
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
    points: list[Point]  # those that differ in their seeds alone follow each other
    metric: str = "loss"  # in evaluations.jsonl
    higher_is_better: bool = False
    start: str | None = None  # the checkpoint that all points branch from; None: they begin at the beginning

    @property
    def options(self) -> list[str]:
        """The words of each run besides its overrides: a branch differs from the run of its checkpoint in these."""
        changed = f"{BATCH},learning_rate,train.duration,optimizer.groups,data.weight_phases,seed"
        return [f"--allow-change={changed}"] if self.start else []

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """The sweep in a folder; UserError if its file cannot be used."""
        file = folder / SWEEP_FILE
        try:
            return TypeAdapter(cls).validate_json(read_bytes(file))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not a sweep's, or cannot be read: {str(error).splitlines()[0]}") from None

    def write(self, folder: Path) -> None:
        """Write the sweep's file. A folder that holds the same sweep with fewer points gets the others, too.

        Raises:
            UserError: The folder holds something else, or cannot be written.
        """
        with file_errors(f"--folder: {folder} cannot be written", "choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / SWEEP_FILE).exists():
                before, now = (sweep._identity() for sweep in (self.read(folder), self))
                if changed := ", ".join(name for name in before if before[name] != now.get(name)):
                    raise UserError(f"--folder: {folder} holds a sweep with other {changed}; choose another folder")
            elif any(folder.iterdir()):
                raise UserError(f"--folder: {folder} holds files that are not a sweep's; choose another folder")
            replace_json_file(folder / SWEEP_FILE, asdict(self))

    def _identity(self) -> dict[str, Any]:
        """What may not change, by dotted name."""
        points = {point.name: point.overrides for point in self.points}
        return flatten({"recipe": self.content, "start": self.start, "points": points})


def grid(words: Sequence[str], seeds: int, seed: int = 0) -> list[Point]:
    """The points of all combinations of the values that overrides list, and of seeds.

    Args:
        words: Overrides. `1e-3,2e-3` lists numbers, and a JSON list any values; anything else is one value.
        seeds: Number of seeds; each of those given as `--seed`, or `seed`, is followed by the next ones.
        seed: The recipe's seed.

    Raises:
        ConfigError: A word is not an override.
        UserError: A list is empty, or has a value twice.
    """
    values = {name: _values(name, text) for name, text in split_overrides(words)}
    seeds_given = values.pop("seed", [seed])
    values["seed"] = [each + more if type(each) is int else each for each in seeds_given for more in range(seeds)]
    swept = [name for name, listed in values.items() if len(listed) > 1 and name != "seed"]
    points: dict[str, Point] = {}
    for combination in itertools.product(*(enumerate(listed, 1) for listed in values.values())):
        chosen = dict(zip(values, combination, strict=True))
        settings = {name: value for name, (_, value) in chosen.items()}
        name = "_".join(f"{field.rpartition('.')[2]}={_shown(*chosen[field])}" for field in [*swept, "seed"])
        if name in points:
            raise UserError(f"{name}: a value is listed twice; list each once")
        points[name] = Point(name, {each: settings[each] for each in swept}, settings["seed"], override_words(settings))
    return list(points.values())


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


def _shown(place: int, value: Any) -> str:
    return str(value) if IN_A_NAME.fullmatch(str(value)) else f"value{place}"
