"""The layout of a checkpoint on disk, and what is in it.

    runs/<run>/checkpoints/
      step_00000400/
        rank_00000.safetensors   what process 0 of the job owned: flat vectors, one tensor a vector
        rank_00001.safetensors   ...
        model_config.json        the configuration of a `transformers` model, where it is one, or of its adapters
        manifest.json            every vector's shape and the ranges of it that each file holds; step, config, plan
        complete.json            size and checksum of every file above; written last, so that it says: all is here
      .step_00000600.attempt_0002_5e1f0a3b.tmp/   one that is being written, or that a crash left behind

Every parameter, and every optimizer state that is no single number, is one *vector*: its elements in row-major order,
under "<kind>/<parameter's fully qualified name>", the kind being "weight", or the optimizer's own word ("exp_avg",
"momentum_buffer"). Whatever the strategy, each process holds contiguous ranges of such vectors, so any number of
processes of any strategy can read what any other has written: the ranges it needs, intersected with those in the files.
Buffers are whole, in their own shape, under "buffer/<name>".

There is no pickle, no random generator's state and no loader's state: everything else follows from the step.
This module needs no torch, so that checkpoints can be listed on a login node.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

FORMAT = "largebatch checkpoint 1"

MANIFEST = "manifest.json"
MODEL_CONFIG = "model_config.json"
MARKER = "complete.json"
WEIGHT = "weight"
BUFFER = "buffer"

# What is the same in a manifest and in its file.
PLAIN = ("step", "attempt", "world_size", "strategy", "time", "bad_steps", "config", "plan")

FOLDER_NAME = re.compile(r"step_([0-9]{8,})")
TEMPORARY_NAME = re.compile(r"\.step_[0-9]{8,}\.attempt_[0-9]{4,}_[0-9a-f]{8}\.(tmp|old)")
FILE_NAME = re.compile(rf"rank_[0-9]{{5,}}\.safetensors|{re.escape(MANIFEST)}|{re.escape(MODEL_CONFIG)}")


class CheckpointError(ValueError):
    """A checkpoint is not complete, or not what it says it is."""


@dataclass(frozen=True)
class Range:
    """Elements `start` to `stop` of a vector, and the file that holds them."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter: its shape, the optimizer's states of it that are single numbers, such as Adam's "step", and the
    shapes of those states that have another shape than the parameter."""

    shape: tuple[int, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    other_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    """Optimizer steps completed."""
    attempt: int
    """Which start of the run wrote it, from 1."""
    world_size: int
    strategy: str
    config: Mapping[str, Any]
    """The resolved recipe, as JSON."""
    plan: Mapping[str, Any]
    bad_steps: int
    """Steps so far whose update was left out because their loss or gradient was not finite."""
    parameters: Mapping[str, ParameterInfo]
    vectors: Mapping[str, tuple[Range, ...]]
    """By "<kind>/<name>": the ranges that make it up, in order and without a gap."""
    buffers: Mapping[str, tuple[str, ...]]
    """The files that hold a buffer: the first one has the value of every process whose own file is not named."""
    running_statistics: tuple[str, ...]
    """Buffers that are BatchNorm's running means and variances: each process has its own, and their mean is used."""
    time: float
    """When it was written, in seconds since 1970."""

    @property
    def kinds(self) -> list[str]:
        """The optimizer's states that are vectors, such as "exp_avg"."""
        return sorted({vector.partition("/")[0] for vector in self.vectors} - {WEIGHT})

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; ranges as [number of the file, start, stop]."""
        files = sorted({part.file for ranges in self.vectors.values() for part in ranges} | self._buffer_files)
        number = {name: index for index, name in enumerate(files)}
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in PLAIN},
            "files": files,
            "parameters": {
                name: {"shape": list(parameter.shape), "scalars": dict(parameter.scalars)}
                | ({"other_shapes": dict(parameter.other_shapes)} if parameter.other_shapes else {})
                for name, parameter in self.parameters.items()
            },
            "vectors": {
                name: [[number[part.file], part.start, part.stop] for part in ranges]
                for name, ranges in self.vectors.items()
            },
            "running_statistics": list(self.running_statistics),
            "buffers": {name: [number[file] for file in holders] for name, holders in self.buffers.items()},
        }

    @property
    def _buffer_files(self) -> set[str]:
        return {file for holders in self.buffers.values() for file in holders}

    @classmethod
    def from_json(cls, raw: Any) -> "Manifest":
        """The manifest that `to_json` made; CheckpointError if it has another format, other files or gaps."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            given = raw.get("format") if isinstance(raw, dict) else raw
            raise CheckpointError(f"its format is {given!r}, this version reads {FORMAT!r}")
        try:
            given = _ManifestJson.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"its {MANIFEST} is not readable: {place}: {first['msg']}") from error
        check_file_names(given.files)
        numbers = [part[0] for ranges in given.vectors.values() for part in ranges]
        numbers += [number for holders in given.buffers.values() for number in holders]
        if numbers and max(numbers) >= len(given.files):
            raise CheckpointError(f"its {MANIFEST} names file number {max(numbers)} of {len(given.files)}")
        manifest = cls(
            **{name: getattr(given, name) for name in PLAIN},
            parameters={
                name: ParameterInfo(
                    tuple(info.shape), info.scalars, {kind: tuple(shape) for kind, shape in info.other_shapes.items()}
                )
                for name, info in given.parameters.items()
            },
            vectors={
                name: tuple(Range(given.files[number], start, stop) for number, start, stop in ranges)
                for name, ranges in given.vectors.items()
            },
            running_statistics=tuple(given.running_statistics),
            buffers={name: tuple(given.files[number] for number in holders) for name, holders in given.buffers.items()},
        )
        manifest.check_coverage()
        return manifest

    def check_coverage(self) -> None:
        """Raise CheckpointError unless each vector is there from its first element to its last, with none twice."""
        for name, ranges in self.vectors.items():
            position = 0
            for part in ranges:
                if part.start != position or part.stop < part.start:
                    raise CheckpointError(f"elements {position} to {part.start} of {name} are missing or there twice")
                position = part.stop
            kind, _, owner = name.partition("/")
            parameter = self.parameters.get(owner)
            if parameter is None:
                raise CheckpointError(f"{name} is of no parameter")
            size = math.prod(parameter.other_shapes.get(kind, parameter.shape))
            if position != size:
                raise CheckpointError(f"{name} has {position} of {size} elements")
        missing = [name for name in self.parameters if f"{WEIGHT}/{name}" not in self.vectors]
        if missing:
            raise CheckpointError(f"the weights of {missing[0]} are missing")


class _ParameterJson(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    shape: list[NonNegativeInt]
    scalars: dict[str, float]
    other_shapes: dict[str, list[NonNegativeInt]] = {}


class _ManifestJson(BaseModel):
    """What `Manifest.to_json` makes, for files that somebody else may have made."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: str
    step: NonNegativeInt
    attempt: NonNegativeInt
    world_size: PositiveInt
    strategy: str
    time: float
    bad_steps: NonNegativeInt
    config: dict[str, Any]
    plan: dict[str, Any]
    files: list[str]
    parameters: dict[str, _ParameterJson]
    vectors: dict[str, list[Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)]]]
    running_statistics: list[str]
    buffers: dict[str, Annotated[list[NonNegativeInt], Field(min_length=1)]]


def overlaps(ranges: Iterable[Range], start: int, stop: int) -> Iterator[tuple[Range, int]]:
    """The parts of `ranges` that lie within `start` to `stop` of the vector, and the place of each in its file."""
    for part in ranges:
        first, last = max(part.start, start), min(part.stop, stop)
        if first < last:
            yield Range(part.file, first, last), first - part.start


def check_file_names(names: Iterable[Any]) -> None:
    """Raise CheckpointError if a name is not one of a checkpoint's files, but a path, for example."""
    for name in names:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"it names a file {name!r}, which is not one of a checkpoint's")


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step` completed steps."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder by its name; None if it is not the name of one."""
    match = FOLDER_NAME.fullmatch(name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


def temporary_name(step: int, attempt: str, suffix: Literal["tmp", "old"]) -> str:
    """Name of a checkpoint while `attempt` (see `storage.attempts`) writes it ("tmp") or deletes it ("old")."""
    return f".{folder_name(step)}.attempt_{attempt}.{suffix}"


def rank_file(rank: int) -> str:
    """Name of the file that process `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def read_json(path: Path) -> Any:
    """The content of a JSON file; CheckpointError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is missing or is not one."""
    try:
        value = read_json(path)
    except CheckpointError:
        return {}
    return value if isinstance(value, dict) else {}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; CheckpointError if it cannot be used."""
    return Manifest.from_json(read_json(folder / MANIFEST))
