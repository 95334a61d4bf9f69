"""Checks across sections, on whatever parts of a config are valid.

pydantic stops at the fields: its validators of the whole never run while any field is wrong. These checks look at the
raw JSON piece by piece instead, so that one error can list the problems of both kinds at once.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from largebatch.batch import Timeline
from largebatch.config.contrastive import Neighbours
from largebatch.config.data import DigitsData
from largebatch.config.masked_lm import MaskedText, num_masked
from largebatch.config.optimizers import WithScaledBetas, registered_optimizers
from largebatch.config.sections import (
    Batch,
    Decay,
    Duration,
    PositiveInt,
    ProfiledSteps,
    StepDecay,
    Warmup,
    WarmupStableDecay,
)
from largebatch.scaling import scaled_moments

JsonObject = dict[str, Any]


def inconsistencies(raw: JsonObject) -> Iterator[str]:
    """Problems between fields, one line each, that begin with the path of the field to change."""
    if _piece(raw, "faults.on_non_finite", str) == "roll_back" and _piece(raw, "checkpoint.every", Duration) is None:
        yield (
            'checkpoint.every: "roll_back" of faults.on_non_finite needs checkpoints to go back to; write a distance, '
            'such as {"steps": 100}'
        )
    yield from _patches_beyond_the_image(raw)
    yield from _blocks_beyond_the_positions(raw)
    yield from _pairs_that_are_parted(raw)
    if _piece(raw, "precision", str) == "fp64" and _piece(raw, "model.architecture", str) in ("llama", "auto"):
        yield (
            'precision: "fp64" would not be that: the RMSNorm of Llama and others in `transformers` computes in fp32 '
            'whatever it is given; write "fp32", or take task "causal_lm" with architecture "gpt2"'
        )
    section = raw.get("batch")
    if not isinstance(section, dict):
        return
    # Unknown keys are reported elsewhere.
    batch = _piece({"batch": {key: section[key] for key in section if key in Batch.model_fields}}, "batch", Batch)
    if batch is None:
        return
    sizes = [size for _, size in batch.sizes]
    yield from _rules_outside_their_range(raw, sizes)
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
    yield from _too_few_neighbours(raw, num_train_samples)
    try:
        timeline = Timeline.build(num_train_samples, batch.sizes, batch.last == "keep", _tokens_per_sample(raw))
    except ValueError as error:
        yield f"batch.global_batch_size: {error}"
        return
    yield from _durations_outside_the_run(raw, timeline)


def _rules_outside_their_range(raw: JsonObject, sizes: Sequence[int]) -> Iterator[str]:
    grows = len(set(sizes)) > 1
    if _piece(raw, "learning_rate.decay.name", str) == "batch_growth" and max(sizes) == sizes[0]:
        yield (
            'learning_rate.decay: "batch_growth" leaves the decay to a batch that grows, and this one does not; write '
            'a list of sizes as batch.global_batch_size, or another decay, such as {"name": "cosine"}'
        )
    name = _piece(raw, "optimizer.name", str)
    section = next((entry.section for entry in registered_optimizers() if entry.name == name), None)
    optimizer = _piece(raw, "optimizer", section) if section is not None else None
    reference = _piece(raw, "learning_rate.reference_batch_size", PositiveInt)
    if not isinstance(optimizer, WithScaledBetas) or optimizer.moments == "fixed":
        return
    path, rule = "optimizer.moments", f'"{optimizer.moments}"'
    if grows:
        yield (
            f"{path}: {rule} would change betas with the batch size, which Adam's bias correction does not allow for; "
            'write "fixed", or a global_batch_size that does not grow'
        )
    if optimizer.moments == "sde" and _piece(raw, "learning_rate.scaling", str) not in ("sqrt", None):
        yield f'{path}: {rule} goes with the square-root rule; write "sqrt" as learning_rate.scaling, or "fixed" here'
    if reference is not None and not grows:
        try:
            scaled_moments(optimizer.moments, sizes[0] / reference, optimizer.betas, optimizer.eps)
        except ValueError as error:
            yield f'{path}: {rule}: {error}; write a smaller batch, or "fixed"'


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
    end = min((last for last in (total, _piece(raw, "train.stop_after_steps", PositiveInt)) if last), default=None)
    profile = _piece(raw, "logging.profile", ProfiledSteps)
    if profile is not None and end is not None and profile.last_step > end:
        yield (
            f"logging.profile.last_step: {profile.last_step} is beyond the last step of the run, {end}; write steps "
            "within it"
        )
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


def _patches_beyond_the_image(raw: JsonObject) -> Iterator[str]:
    patch_size = _piece(raw, "model.patch_size", PositiveInt)
    image_size = _piece(raw, "data.image_size", PositiveInt)
    if image_size is None and _piece(raw, "data.source", str) == "digits":
        # Pieces of raw JSON do not know defaults.
        image_size = DigitsData.model_fields["image_size"].default
    if patch_size is not None and image_size is not None and image_size % patch_size:
        yield (
            f"model.patch_size: {patch_size} does not divide data.image_size {image_size}, so a part of each image "
            f"would be left out; write a divisor of {image_size}, or change data.image_size"
        )


def _blocks_beyond_the_positions(raw: JsonObject) -> Iterator[str]:
    block_size = _piece(raw, "data.block_size", PositiveInt)
    max_positions = _piece(raw, "model.max_positions", PositiveInt)
    if block_size is not None and max_positions is not None and block_size > max_positions:
        yield (
            f"data.block_size: {block_size} is more than the {max_positions} positions of model.max_positions; shorten "
            "the blocks, or write more positions"
        )


def _pairs_that_are_parted(raw: JsonObject) -> Iterator[str]:
    micro_batch_size = _piece(raw, "batch.micro_batch_size", PositiveInt)
    if _piece(raw, "loss.mixup_alpha", float) is not None and micro_batch_size is not None and micro_batch_size % 2:
        yield (
            f"batch.micro_batch_size: {micro_batch_size} is odd, and loss.mixup_alpha mixes samples in pairs, which "
            "micro-batches would part; write an even one"
        )


def _tokens_per_sample(raw: JsonObject) -> int | None:
    """Target tokens of each sample, None where samples have none or unequal numbers."""
    block_size: int | None = _piece(raw, "data.block_size", PositiveInt)
    task = _piece(raw, "task", str)
    if block_size is None or task == "sft" or _piece(raw, "data.samples", str) == "documents":
        return None
    if task != "masked_lm":
        return block_size
    # Pieces of raw JSON do not know defaults.
    fraction = _piece(raw, "data.mask_fraction", float) or MaskedText.model_fields["mask_fraction"].default
    return num_masked(block_size, fraction) or None


def _too_few_neighbours(raw: JsonObject, num_train_samples: int) -> Iterator[str]:
    neighbours = _piece(raw, "neighbours", Neighbours)
    if neighbours is None:
        return
    bank_samples = neighbours.bank_samples or num_train_samples
    if bank_samples > num_train_samples:
        yield f"neighbours.bank_samples: {bank_samples} is more than the {num_train_samples} training samples"
    elif neighbours.count > bank_samples:
        yield f"neighbours.count: {neighbours.count} neighbours are more than the {bank_samples} samples they are among"


def _digits_samples(raw: JsonObject) -> int | None:
    """The digits' number of samples has a default, which pieces of raw JSON do not know."""
    is_digits = _piece(raw, "data.source", str) == "digits"
    return DigitsData.model_fields["num_train_samples"].default if is_digits else None


def _piece(raw: JsonObject, path: str, kind: Any) -> Any:
    """The valid value at a dotted path of the raw JSON, or None where it is missing or invalid."""
    value: Any = raw
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    try:
        # Not `validate_python`, to which a list is no tuple.
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
