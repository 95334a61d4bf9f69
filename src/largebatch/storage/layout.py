"""The layout of a checkpoint on disk, and its manifest. Needs no torch, so that a login node can list checkpoints.

    runs/<run>/checkpoints/
      step_00000400/
        rank_00000.safetensors   what process 0 of the job owned: flat vectors, one tensor per vector
        rank_00001.safetensors   ...
        model_config.json        the configuration of a `transformers` model or of its adapters, if it is one
        base_config.json         the configuration of the model that has adapters
        tokenizer.json           and the like, of the model that it was trained from
        manifest.json            every vector's shape and the ranges of it that each file holds; step, config, plan
        complete.json            size and checksum of every file above; written last, so it proves that all are there
      .step_00000600.attempt_0002_5e1f0a3b.tmp/   one that is being written, or that a crash left behind

Every parameter, and every optimizer state that is not a scalar, is a *vector*: its elements in row-major order,
under "<kind>/<parameter's fully qualified name>", where the kind is "weight" or the optimizer's own term ("exp_avg",
"momentum_buffer"), or "ema" for a moving average of the weights. Whatever the strategy, each process holds contiguous
ranges of such vectors, so any number of processes of any strategy can read what any other has written: the ranges it
needs, intersected with those in the files. Buffers are whole, in their own shape, under "buffer/<name>"; the
BatchNorm statistics that go with averaged weights, under "buffer/ema/<name>".

There is no pickle and no state of a random generator or loader: everything else follows from the step.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError

from largebatch.config.problems import JsonObject, explained
from largebatch.errors import is_transient
from largebatch.system.regular_file import read_bytes

# For checkpoints and run folders; changes whenever one of them, or a config or plan in it, cannot be read as before.
FORMAT = "largebatch 5"

MANIFEST = "manifest.json"
MODEL_CONFIG = "model_config.json"
BASE_CONFIG = "base_config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_CHAT_TEMPLATES = "additional_chat_templates"  # a folder of those besides the default
# Files that go with a model's weights under their own names, as `save_pretrained` writes them.
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# What servers read before they run a model that also reads images or sounds.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
COPIED_FILES = (GENERATION_CONFIG, *PROCESSOR_FILES, *TOKENIZER_FILES)
MODEL_FILES = (MODEL_CONFIG, BASE_CONFIG, *COPIED_FILES)
MARKER = "complete.json"
WEIGHT = "weight"
BUFFER = "buffer"

FOLDER_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")  # as `folder_name` writes it
TEMPORARY_NAME = re.compile(r"\.step_[0-9]{8,}\.attempt_[0-9]{4,}_[0-9a-f]{8}\.(tmp|old)")
FILE_NAME = re.compile("|".join([r"rank_[0-9]{5,}\.safetensors", *map(re.escape, (MANIFEST, *MODEL_FILES))]))

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]  # as torch allows


class CheckpointError(ValueError):
    """A checkpoint is not complete, or not what it says it is."""


class Range(NamedTuple):
    """Elements `start` to `stop` of a vector, and the rank of the process that wrote them to its file."""

    rank: Count
    start: Count
    stop: Count


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter's shape, and what the optimizer keeps for it besides vectors of that shape."""

    shape: Shape
    scalars: Mapping[str, FiniteFloat]  # its scalar states, such as Adam's "step"
    # The shapes of its states whose shape differs from the parameter's.
    other_shapes: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a run so far."""

    metric: str  # its name in evaluations.jsonl
    mode: Literal["min", "max"]  # which values are better
    step: Count
    value: FiniteFloat


class Manifest(BaseModel):
    """A checkpoint's description of itself, as stored in its manifest.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    step: Count  # optimizer steps completed
    attempt: Count  # the start of the run that wrote it, counted from 1
    world_size: Annotated[int, Field(strict=True, gt=0)]
    strategy: str
    time: float  # when it was written, in seconds since 1970
    bad_steps: Count  # steps so far whose update was skipped
    grad_norms: tuple[FiniteFloat, ...] = ()  # of the latest steps, with which `faults.spike` compares
    best: BestEvaluation | None = None  # that of `checkpoint.keep_best`, whose checkpoint is complete
    samples: dict[str, list[FiniteFloat]] = {}  # numbers of some samples, with which a resumed run compares its own
    config: JsonObject  # the resolved recipe, as JSON
    plan: JsonObject
    parameters: dict[str, ParameterInfo]
    vectors: dict[str, tuple[Range, ...]]  # by "<kind>/<name>": the ranges that make it up, in order and without a gap
    # Buffers that are BatchNorm's running means and variances: each process has its own, and their mean is used.
    running_statistics: tuple[str, ...]
    # The ranks whose files hold a buffer: the first one's has the value of every process that is not named.
    buffers: dict[str, Annotated[tuple[Count, ...], Field(min_length=1)]]

    def check_coverage(self) -> None:
        """Raise CheckpointError unless each vector is there from its first element to its last, with none twice."""
        for name, ranges in self.vectors.items():
            position = 0
            for part in ranges:
                if part.start != position or part.stop < part.start:
                    raise CheckpointError(f"elements {position} to {part.start} of {name} are missing or duplicated")
                position = part.stop
            kind, _, owner = name.partition("/")
            parameter = self.parameters.get(owner)
            if parameter is None:
                raise CheckpointError(f"{name} belongs to no parameter")
            size = math.prod(parameter.other_shapes.get(kind, parameter.shape))
            if position != size:
                raise CheckpointError(f"{name} has {position} of {size} elements")
        for name in self.parameters:
            if f"{WEIGHT}/{name}" not in self.vectors:
                raise CheckpointError(f"the weights of {name} are missing")


def overlaps(ranges: Iterable[Range], start: int, stop: int) -> Iterator[tuple[Range, int]]:
    """The parts of `ranges` that lie within `start` to `stop` of the vector, and the place of each in its file."""
    for part in ranges:
        first = max(part.start, start)
        last = min(part.stop, stop)
        if first < last:
            yield Range(part.rank, first, last), first - part.start


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step` completed steps."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder by its name; None if it is not the name of one."""
    match = FOLDER_NAME.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(name: str, attempt: str, suffix: Literal["tmp", "old"]) -> str:
    """Another name of a checkpoint's folder while an attempt of this name writes it ("tmp") or deletes it ("old")."""
    return f".{name}.attempt_{attempt}.{suffix}"


def rank_file(rank: int) -> str:
    """Name of the file that process `rank` writes."""
    return f"rank_{rank:05d}.safetensors"


def read_json(path: Path, follow_links: bool = False) -> JsonObject:
    """The object in a JSON file; CheckpointError if it is missing, not one, or a link that is not to be followed.

    OSError if it cannot be read now.
    """
    with reading(path.name):
        value = json.loads(read_bytes(path, follow_links).decode())
        if not isinstance(value, dict):
            raise CheckpointError(f"{path.name} is not an object")
        return value


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Raise CheckpointError for a file that is missing or not what it should be; OSError if it cannot be read now."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except (SafetensorError, OSError, LookupError, ValueError, RecursionError) as error:
        if is_transient(error):
            raise
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def read_object(path: Path) -> JsonObject:
    """The object in a JSON file; empty if it is missing, is not one, or cannot be read now."""
    try:
        return read_json(path)
    except (CheckpointError, OSError):
        return {}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; CheckpointError if it has another format or gaps."""
    raw = read_json(folder / MANIFEST)
    if raw.get("format") != FORMAT:
        raise CheckpointError(
            f"its format is {raw.get('format')!r}, not {FORMAT!r}; use the version of largebatch that wrote it, or "
            "start over"
        )
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        place, problem = next(explained(error, Manifest.model_json_schema()))
        raise CheckpointError(f"its {MANIFEST} is not readable: {place}: {problem}") from error
    manifest.check_coverage()
    return manifest
