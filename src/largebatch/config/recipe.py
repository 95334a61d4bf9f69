"""The fields that every recipe has, and checks across them; the `Config` of a task adds its data, model and more."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from largebatch.batch import Timeline
from largebatch.batch.division import nearest_multiples
from largebatch.config.data import Data, Mixable, TextData
from largebatch.config.learning_rate import BatchGrowth, LearningRate, WarmupStableDecay
from largebatch.config.models import Model
from largebatch.config.optimizers import OptimizerEntry, union_of_sections
from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.config.optimizers.shipped import SHIPPED
from largebatch.config.sections import (
    Batch,
    Checkpoint,
    Compute,
    Duration,
    Evaluation,
    Expected,
    Faults,
    Logging,
    NonNegativeInt,
    Section,
    Train,
)

Check = Callable[[Any], Iterator[str]]


def check(method: Check) -> Check:
    """Mark a method of a config as a check of fields against each other.

    The method yields problems, one line each, starting with the path of the field to change: "data.block_size: 512 is
    more than …; write …". Checks run once all sections are valid.
    """
    method._is_check = True  # type: ignore[attr-defined]
    return method


class RecipeConfig(Section):
    """The fields that every recipe has."""

    model_config = ConfigDict(validate_by_name=False, validate_default=True)

    schema_: str | None = Field(default=None, alias="$schema")
    """Path of the JSON Schema, for editors."""
    seed: NonNegativeInt = 0
    """Seed of everything random: initial weights, sample order, augmentation and dropout."""
    precision: Literal["fp32", "bf16", "fp64"]
    """"fp32": no autocast. "bf16": matrix products in bfloat16 under autocast; weights, gradients and their reduction
    in fp32. "fp64": slow, shows differences that are not rounding errors (not on DeepSpeed ZeRO)."""
    data: Data
    model: Model
    batch: Batch
    learning_rate: LearningRate
    optimizer: OptimizerSection
    train: Train
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    compute: Compute = Compute()
    logging: Logging = Logging()
    expected: Expected | None = None
    """A published figure of the recipe's settings, which a finished run is compared with; null: there is none."""
    demonstration: bool = False
    """Whether the recipe shows how something works rather than how to train well, so that its plan gets no notes."""
    debug_model: dict[str, Any] | None = None
    """Fields of the model section, with values that make a large model small for `largebatch verify`; null verifies the
    model as it is."""

    free_on_resume: ClassVar[tuple[str, ...]] = ()
    """Fields of the task, such as those of its evaluation, that a resumed run may change: they do not affect training.
    """
    optimizers: ClassVar[tuple[OptimizerEntry, ...]] = SHIPPED
    """The optimizers that the task's recipes may name."""
    further_sets: ClassVar[tuple[str, ...]] = ()
    """Names of the sets that the task's train.py evaluates besides the evaluation set."""

    def __init_subclass__(cls, **settings: Any) -> None:
        # Pydantic reads the annotations after this.
        cls.__annotations__["optimizer"] = union_of_sections(cls.optimizers)
        super().__init_subclass__(**settings)

    @classmethod
    def checks(cls) -> list[Check]:
        """All methods marked with `check`, also those of parent classes."""
        return [method for _, method in inspect.getmembers_static(cls, lambda each: getattr(each, "_is_check", False))]

    @property
    def timeline(self) -> Timeline:
        """The global batches of the run.

        Raises:
            ValueError: A size starts at a moment in a unit that the data does not have, or not after the previous one.
        """
        return Timeline.build(
            self.data.samples_per_epoch, self.batch.phases, not self.batch.drop_last, self.data.tokens_per_sample
        )

    @property
    def optimizer_entry(self) -> OptimizerEntry:
        """The entry of the recipe's optimizer."""
        return next(entry for entry in self.optimizers if entry.section is type(self.optimizer))

    def with_micro_batch_size(self, size: int) -> Self:
        """The config with a number in place of "auto"."""
        return self.model_copy(update={"batch": self.batch.model_copy(update={"micro_batch_size": size})})

    # --- what a task may override ---------------------------------------------------------------------------------

    @classmethod
    def task_folder(cls) -> Path:
        """The task's folder."""
        return Path(inspect.getfile(cls)).parent

    @property
    def task(self) -> str:
        """The name of the task's folder."""
        return self.task_folder().name

    @property
    def coupled_features(self) -> int:
        """How many numbers of each sample the loss compares with those of all others of its global batch, as
        `Step.couple` gathers them; 0 if each sample has its own loss."""
        return 0

    @property
    def tokens_processed_per_sample(self) -> int | None:
        """Tokens that a transformer processes per training sample, for `mfu`; None if there are none or it varies."""
        return self.data.block_size if isinstance(self.data, TextData) else None

    def tiny_data(self) -> dict[str, Any] | None:
        """Overrides by dotted path that replace large data with small data of the same kind, for `verify --tiny-data`.

        The small data must be available on every machine. None: the recipe's own data is small and always available.
        """
        return None

    # --- checks across the sections that all tasks have -----------------------------------------------------------

    def without_effect(self, path: str, reason: str) -> Iterator[str]:
        """The problem that a field of a section is given, although nothing reads it for this reason.

        One that has its default is not given: the configs that runs keep have all fields.
        """
        section, field = path.split(".")
        if field in getattr(self, section).model_dump(exclude_defaults=True):
            yield f"{path}: has no effect, because {reason}; remove it"

    @check
    def _settings_that_go_together(self) -> Iterator[str]:
        rate = self.learning_rate
        checkpoint = self.checkpoint
        faults = self.faults
        sizes = self.batch.sizes
        normalizes = self.model.uses_batch_norm
        if rate.warmup and rate.warmup.start == "base_lr" and rate.scaling == "none":
            yield 'learning_rate.warmup: it would end where it starts, because scaling is "none"; write start "zero"'
        if rate.reference_duration and getattr(self.optimizer, "weight_decay_scaling", "fixed") == "fixed":
            yield "learning_rate.reference_duration: only rules of weight_decay_scaling use it; write one, or remove it"
        if isinstance(rate.decay, BatchGrowth) and max(sizes) == sizes[0]:
            yield 'learning_rate.decay: "batch_growth" needs a growing batch; write a list as batch.global_batch_size'
        if faults.on_non_finite == "stop":
            yield from self.without_effect("faults.max_bad_steps", 'faults.on_non_finite is "stop"')
        if not self.coupled_features:
            yield from self.without_effect("compute.couple", "each sample of this task has its own loss")
        taken = {"then", "ema"}
        for name in sorted(self.evaluation.sets.keys() & taken):
            yield f'evaluation.sets: "{name}/" begins the names of other metrics; rename the set'
        for name in sorted(self.evaluation.sets.keys() - taken - {*self.further_sets}):
            yield f'evaluation.sets: train.py does not evaluate "{name}"; remove it, or add it to Config.further_sets'
        if faults.on_non_finite == "roll_back" and not (checkpoint.every or checkpoint.keep_every):
            yield 'checkpoint.every: faults.on_non_finite "roll_back" needs it; write one, such as {"steps": 100}'
        metric = checkpoint.keep_best.metric.split("/") if checkpoint.keep_best else []
        if "ema" in metric and not self.optimizer.ema_half_life:
            yield "checkpoint.keep_best.metric: averaged weights need optimizer.ema_half_life; write it, or another one"
        if metric[:1] == ["then"]:
            yield "checkpoint.keep_best.metric: checkpoint.then follows what is kept; write a number of an evaluation"
        if normalizes and not self.batch.drop_last:
            yield "batch.drop_last: false changes the loss of a model with BatchNorm at the end of an epoch; write true"
        if self.coupled_features and min(sizes) == 1:
            yield "batch.global_batch_size: a single sample has no others to be compared with; write at least 2"
        if self.logging.noise_scale is not None and (self.coupled_features or normalizes):
            which = "a loss over the whole global batch" if self.coupled_features else "BatchNorm"
            yield f"logging.noise_scale: {which} makes the gradients of samples depend on each other; write null"

    @check
    def _whole_micro_batches(self) -> Iterator[str]:
        micro = self.batch.micro_batch_size
        if self.batch.finds_micro_batch_size:
            if self.model.uses_batch_norm:
                yield (
                    'batch.micro_batch_size: "auto" would choose the loss of a model with BatchNorm, which normalizes '
                    "over the micro-batch; write a number"
                )
            return
        for size in self.batch.sizes:
            if size % micro:
                nearest = nearest_multiples(size, micro)
                yield f"batch.global_batch_size: {size} is not a multiple of batch.micro_batch_size {micro}; {nearest}"
                return

    @check
    def _sums_over_the_sources(self) -> Iterator[str]:
        sections = self.data.sections().values()
        for field in ("num_train_samples", "num_eval_samples"):
            given = getattr(self.data, field)
            total = sum(getattr(section, field) for section in sections)
            if sections and given != total:
                yield f"data.{field}: {given}, but the sources add up to {total}; write {total}"

    @check
    def _shares_of_the_sources(self) -> Iterator[str]:
        mixture = self.data.mixture
        if mixture is None or not isinstance(self.data, Mixable):
            return
        smallest = min(self.batch.sizes)
        total = sum(mixture.weights)
        for source, weight, size in zip(self.data.sources or (), mixture.weights, mixture.sizes, strict=True):
            if 0 < weight * smallest < total:
                given = source.weight or size
                least = given * (total - weight) / (weight * max(smallest - 1, 1))
                remedy = f"write at least {math.ceil(least * 1e6) / 1e6:g}, a larger batch.global_batch_size, or 0"
                problem = f'weight {given:g} gives "{source.name}" less than one sample per batch of {smallest}'
                yield f"data.sources: {problem}; {remedy}"

    @check
    def _rules_of_the_optimizer(self) -> Iterator[str]:
        optimizer = self.optimizer
        rate = self.learning_rate
        sizes = set(self.batch.sizes)
        rules = {name: getattr(optimizer, name) for name in optimizer.rules}
        for name, rule in rules.items():
            if rule == optimizer.square_root_rules.get(name) and rate.scaling != "sqrt":
                remedy = 'write "fixed", or set learning_rate.scaling to "sqrt"'
                yield f'optimizer.{name}: "{rule}" requires the square-root rule; {remedy}'
            if rule != "fixed" and len(sizes) > 1:
                remedy = 'write "fixed", or a batch that does not grow'
                yield f'optimizer.{name}: "{rule}" would change the optimizer with the batch size; {remedy}'
        if rules.get("weight_decay_scaling") == "power_lines":
            if rate.reference_duration is None:
                remedy = 'write that of the tuned run, such as {"tokens": 5000000000}'
                yield f'learning_rate.reference_duration: null, but "power_lines" needs a length; {remedy}'
            if self.data.tokens_per_sample is None:
                why = "is a law of tokens, and these samples have no fixed number of them"
                yield f'optimizer.weight_decay_scaling: "power_lines" {why}; write "timescale" or "fixed"'
        if rules.get("beta_scaling", "fixed") != "fixed" and len(sizes) == 1:
            try:
                optimizer.options_for(min(sizes) / rate.reference_batch_size)
            except ValueError as error:
                yield f'optimizer.beta_scaling: {error}; write a smaller batch, or "fixed"'

    @check
    def _durations_within_the_run(self) -> Iterator[str]:
        num_samples = self.data.num_train_samples
        largest = max(self.batch.sizes)
        if largest > num_samples:
            remedy = "write fewer"
            if self.data.is_counted:
                remedy += ", or correct data.num_train_samples (largebatch prepare RECIPE --write counts them)"
            yield f"batch.global_batch_size: {largest} is more than the {num_samples} training samples; {remedy}"
            return
        try:
            timeline = self.timeline
        except ValueError as error:
            yield f"batch.global_batch_size: {error}"
            return
        steps: dict[str, int] = {}
        for path, duration in _durations_in(self, ""):
            try:
                steps[path] = timeline.steps_in(duration.length)
            except ValueError as error:
                yield f"{path}: {error}"
        if "train.duration" in steps:
            yield from self._problems_of_the_run(timeline, steps)

    def _problems_of_the_run(self, timeline: Timeline, steps: Mapping[str, int]) -> Iterator[str]:
        """What does not fit into the run; `steps` are the durations by their paths."""
        total = steps["train.duration"]
        last_phase = timeline.phases[-1]
        if last_phase.first_step >= total:
            starts = f"size {last_phase.global_batch_size} starts at step {last_phase.first_step}"
            yield f"batch.global_batch_size: {starts}, but the run has {total}; remove it, or lengthen train.duration"
        rate = self.learning_rate
        warmup = steps.get("learning_rate.warmup.duration", 0)
        if rate.warmup and warmup > total:
            remedy = "shorten it, or lengthen train.duration"
            if self.train.stop_after_steps is None:
                remedy += "; for a trial, set train.stop_after_steps instead"
            yield f"learning_rate.warmup.duration: warmup takes {warmup} steps, and the whole run {total}; {remedy}"
            return
        milestones = [(path, step) for path, step in steps.items() if path.startswith("learning_rate.decay.at[")]
        for (_, previous), (path, step) in pairwise([("", warmup), *milestones]):
            if not previous < step < total:
                given = f"it is step {step}, not after {previous} and before {total}"
                yield f"{path}: {given}; write milestones within the run, in increasing order"
        path = "learning_rate.decay.decay"
        if isinstance(rate.decay, WarmupStableDecay) and path in steps:
            start = timeline.steps_before(total, rate.decay.decay.length)
            if start is None or start < warmup:
                both = f"{rate.decay.decay.length} of decay after {warmup} steps of warmup"
                yield f"{path}: {both} is longer than the whole run of {total} steps; shorten one of them"


def _durations_in(value: Any, path: str) -> Iterator[tuple[str, Duration]]:
    """All durations in a part of a recipe, also those of the task's own sections, with their paths."""
    if isinstance(value, Duration):
        yield path, value
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _durations_in(each, f"{path}[{number}]")
    elif isinstance(value, Section):
        yield from _durations_in(vars(value), path)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _durations_in(each, f"{path}.{name}".lstrip("."))


def as_json(config: RecipeConfig) -> dict[str, Any]:
    """The recipe as a JSON object, with every default filled in and the name of its task."""
    return {"task": config.task, **config.model_dump(mode="json", by_alias=True, exclude={"schema_"})}


def flatten(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names: {"batch": {"drop_last": true}} becomes {"batch.drop_last": true}.

    Those in a list have their numbers as names: "data.sources.0.path".
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        has_sections = isinstance(value, list) and value and isinstance(value[0], Mapping)
        section = dict(enumerate(value)) if has_sections else value
        if isinstance(section, Mapping):
            flat |= flatten(section, f"{path}.")
        else:
            flat[path] = value
    return flat
