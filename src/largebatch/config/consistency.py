"""Checks across sections, on whatever parts of a config are valid.

pydantic stops at the fields: its validators of the whole never run while any field is wrong. These checks look at the
raw JSON piece by piece instead, so that one error can list the problems of both kinds at once.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from largebatch.batch import Timeline
from largebatch.config.sections import Batch, Decay, Duration, PositiveInt, StepDecay, Warmup, WarmupStableDecay

JsonObject = dict[str, Any]


def inconsistencies(raw: JsonObject) -> Iterator[str]:
    """Problems between fields, one line each, that begin with the path of the field to change."""
    if _piece(raw, "faults.on_non_finite", str) == "roll_back" and _piece(raw, "checkpoint.every", Duration) is None:
        yield (
            'checkpoint.every: "roll_back" of faults.on_non_finite needs checkpoints to go back to; write a distance, '
            'such as {"steps": 100}'
        )
    section = raw.get("batch")
    if not isinstance(section, dict):
        return
    # Unknown keys are reported elsewhere.
    batch = _piece({"batch": {key: section[key] for key in section if key in Batch.model_fields}}, "batch", Batch)
    if batch is None:
        return
    sizes = [size for _, size in batch.sizes]
    for size in sizes:
        if size % batch.micro_batch_size:
            below = size // batch.micro_batch_size * batch.micro_batch_size
            nearest = ", ".join(str(near) for near in (below, below + batch.micro_batch_size) if near > 0)
            yield (
                f"batch.global_batch_size: {size} is not a multiple of batch.micro_batch_size "
                f"{batch.micro_batch_size}; nearest: {nearest}"
            )
            break
    num_train_samples = _piece(raw, "data.num_train_samples", PositiveInt) or _digits_samples(raw)
    if num_train_samples is None:
        return
    if max(sizes) > num_train_samples:
        yield (
            f"batch.global_batch_size: {max(sizes)} is more than the {num_train_samples} training samples, so "
            f"there is no whole batch in an epoch; write at most {num_train_samples}"
        )
        return
    tokens_per_sample = None
    if raw.get("task") == "causal_lm" and _piece(raw, "data.samples", str) != "documents":
        tokens_per_sample = _piece(raw, "data.block_size", PositiveInt)
    try:
        timeline = Timeline.build(num_train_samples, batch.sizes, batch.last == "keep", tokens_per_sample)
    except ValueError as error:
        yield f"batch.global_batch_size: {error}"
        return
    yield from _durations_outside_the_run(raw, timeline)


def _durations_outside_the_run(raw: JsonObject, timeline: Timeline) -> Iterator[str]:
    def steps(path: str, duration: Duration | None) -> tuple[int | None, str | None]:
        if duration is None:
            return None, None
        try:
            return timeline.steps_in(duration.length), None
        except ValueError as error:
            return None, f"{path}: {error}"

    total, problem = steps("train.duration", _piece(raw, "train.duration", Duration))
    if problem:
        yield problem
    for path in ("evaluation.every", "checkpoint.every", "checkpoint.keep_every"):
        _, problem = steps(path, _piece(raw, path, Duration))
        if problem:
            yield problem
    last_phase = timeline.phases[-1]
    if total is not None and last_phase.first_step >= total:
        yield (
            f"batch.global_batch_size: the size {last_phase.global_batch_size} comes into force at step "
            f"{last_phase.first_step}, not within the run of {total} steps; leave it out, or lengthen train.duration"
        )

    warmup = _piece(raw, "learning_rate.warmup", Warmup)
    warmup_steps, problem = steps("learning_rate.warmup.duration", warmup and warmup.duration)
    if problem:
        yield problem
    if warmup and warmup_steps is not None and total is not None and warmup_steps > total:
        yield (
            f"learning_rate.warmup.duration: {warmup.duration.length} are {warmup_steps} steps, longer than the whole "
            f"run of {total}; shorten it, or lengthen train.duration"
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
            given = f"{path}: {milestone.length} is step {at}"
            if at <= previous:
                yield f"{given}, not after step {previous}; write them in increasing order"
            if total is not None and at >= total:
                yield f"{given}, not within the run of {total} steps; leave it out or lower it"
            previous = at
    if isinstance(decay, WarmupStableDecay) and total is not None:
        path = "learning_rate.decay.decay"
        try:
            start = timeline.steps_before(total, decay.decay.length)
        except ValueError as error:
            yield f"{path}: {error}"
            return
        if start is None or start < (warmup_steps or 0):
            yield (
                f"{path}: {decay.decay.length} of decay after {warmup_steps or 0} steps of warmup are longer than the "
                f"whole run of {total} steps; shorten one of them"
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
