"""The overrides that make a recipe small.

Small are a recipe's debug model, data and a batch for a laptop's CPU without a hub, and a schedule of a few steps.
"""

import math
from collections.abc import Sequence
from typing import Any

from largebatch.config import RecipeConfig, override_words
from largebatch.config.learning_rate import StepDecay, WarmupStableDecay
from largebatch.config.sections import LinearRamp

MAX_SIZES = 4
"""About the most batch sizes of a ramp that a short run goes through."""
LONG = '--train.duration={"steps": 1000000000}'
"""A run that is long enough for any warmup, and must be stopped early."""


def debug_model_overrides(config: RecipeConfig) -> list[str]:
    """The overrides that replace the model with the recipe's `debug_model`; none if it has none."""
    return override_words({f"model.{name}": value for name, value in (config.debug_model or {}).items()})


def tiny_data_overrides(config: RecipeConfig) -> list[str]:
    """The overrides that replace the recipe's data with the task's tiny data; none if the recipe's own is small.

    The batch is then 32 samples, and the run is `LONG`.
    """
    tiny = config.tiny_data()
    if tiny is None:
        return []
    batch = {"global_batch_size": 32, "micro_batch_size": 8}
    return [LONG, *override_words({"batch": batch, **tiny})]


def short_schedule_overrides(config: RecipeConfig, steps: int) -> list[str]:
    """The overrides with which everything that is planned for some moment of the run happens within its first steps.

    In the first steps of a long warmup, the learning rate is so small that no error of an optimizer shows in weights.
    The warmup and the decay of a warmup-stable-decay schedule each become a quarter of the run. Milestones and batch
    sizes change at equal intervals. The schedule is only longer than `steps` if they are too few for all of this.
    """
    rate = config.learning_rate
    milestones = rate.decay.at if isinstance(rate.decay, StepDecay) else []
    planned = config.batch.sizes
    if isinstance(config.batch.global_batch_size, LinearRamp):
        planned = sorted({*planned[:: math.ceil(len(planned) / MAX_SIZES)], planned[-1]})
    length = max(steps, 4, len(milestones) + 2, len(planned) + 1)
    quarter = length // 4
    changes: dict[str, Any] = {"train.duration": {"steps": length}}
    if rate.warmup:
        changes["learning_rate.warmup.duration"] = {"steps": quarter}
    if isinstance(rate.decay, WarmupStableDecay):
        changes["learning_rate.decay.decay"] = {"steps": quarter}
    if milestones:
        changes["learning_rate.decay.at"] = _moments(milestones, quarter, length)
    if len(planned) > 1:
        moments = [{"steps": 0}, *_moments(planned[1:], 0, length)]
        sizes = [{"from": at, "size": size} for at, size in zip(moments, planned, strict=True)]
        changes["batch.global_batch_size"] = sizes
    return override_words(changes)


def _moments(changes: Sequence[Any], start: int, end: int) -> list[dict[str, int]]:
    """A moment for each change, at equal intervals between two steps."""
    count = len(changes)
    return [{"steps": start + number * (end - start) // (count + 1)} for number in range(1, count + 1)]
