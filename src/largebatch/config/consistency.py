"""Checks across sections, on whatever parts of a config are valid.

pydantic stops at the fields: its validators of the whole never run while any field is wrong. These checks look at the
raw JSON piece by piece instead, so that one error can list the problems of both kinds at once.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from largebatch.config.sections import Decay, Duration, PositiveInt, StepDecay, Warmup, WarmupStableDecay
from largebatch.config.units import StepUnits

JsonObject = dict[str, Any]


def inconsistencies(raw: JsonObject) -> Iterator[str]:
    """Problems between fields, one line each, that begin with the path of the field to change."""
    global_batch_size = _piece(raw, "batch.global_batch_size", PositiveInt)
    micro_batch_size = _piece(raw, "batch.micro_batch_size", PositiveInt)
    num_train_samples = _piece(raw, "data.num_train_samples", PositiveInt) or _digits_samples(raw)
    if global_batch_size is None:
        return
    if micro_batch_size is not None and global_batch_size % micro_batch_size:
        below = global_batch_size // micro_batch_size * micro_batch_size
        nearest = ", ".join(str(size) for size in (below, below + micro_batch_size) if size > 0)
        yield (
            f"batch.global_batch_size: {global_batch_size} is not a multiple of batch.micro_batch_size "
            f"{micro_batch_size}; nearest: {nearest}"
        )
    if num_train_samples is None:
        return
    if global_batch_size > num_train_samples:
        yield (
            f"batch.global_batch_size: {global_batch_size} is more than the {num_train_samples} training samples, so "
            f"there is no whole batch in an epoch; write at most {num_train_samples}"
        )
        return
    tokens_per_sample = _piece(raw, "data.block_size", PositiveInt)
    yield from _durations_outside_the_run(raw, StepUnits(global_batch_size, num_train_samples, tokens_per_sample))


def _durations_outside_the_run(raw: JsonObject, units: StepUnits) -> Iterator[str]:
    def steps(path: str, duration: Duration | None) -> tuple[int | None, str | None]:
        if duration is None:
            return None, None
        try:
            return units.steps_in(duration), None
        except ValueError as error:
            return None, f"{path}: {error}"

    total, problem = steps("train.duration", _piece(raw, "train.duration", Duration))
    if problem:
        yield problem
    _, problem = steps("evaluation.every", _piece(raw, "evaluation.every", Duration))
    if problem:
        yield problem

    warmup = _piece(raw, "learning_rate.warmup", Warmup)
    warmup_steps, problem = steps("learning_rate.warmup.duration", warmup and warmup.duration)
    if problem:
        yield problem
    if warmup and warmup_steps is not None and total is not None and warmup_steps > total:
        yield (
            f"learning_rate.warmup.duration: {warmup.duration} are {warmup_steps} steps, longer than the whole run of "
            f"{total}; shorten it, or lengthen train.duration"
        )
        return

    decay = _piece(raw, "learning_rate.decay", Decay)
    if isinstance(decay, StepDecay):
        previous = 0
        for number, milestone in enumerate(decay.at):
            path = f"learning_rate.decay.at[{number}]"
            at, problem = steps(path, milestone)
            if problem:
                yield problem
            if at is None:
                continue
            if at <= previous:
                yield f"{path}: {milestone} is step {at}, not after step {previous}; write them in increasing order"
            if total is not None and at >= total:
                yield f"{path}: {milestone} is step {at}, not within the run of {total} steps; leave it out or lower it"
            previous = at
    if isinstance(decay, WarmupStableDecay):
        path = "learning_rate.decay.decay"
        decay_steps, problem = steps(path, decay.decay)
        if problem:
            yield problem
        if decay_steps is not None and total is not None and (warmup_steps or 0) + decay_steps > total:
            yield (
                f"{path}: {decay_steps} steps of decay after {warmup_steps or 0} of warmup are longer than the whole "
                f"run of {total}; shorten one of them"
            )


def _digits_samples(raw: JsonObject) -> int | None:
    """The digits' number of samples has a default, which pieces of raw JSON do not know."""
    return 1437 if _piece(raw, "data.source", str) == "digits" else None


def _piece(raw: JsonObject, path: str, kind: Any) -> Any:
    """The valid value at a dotted path of the raw JSON, or None where it is missing or invalid."""
    value: Any = raw
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
