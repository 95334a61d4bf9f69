"""What every recipe's JSON has; the `Config` of a task's folder adds its data, its model, and what else it needs."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from largebatch.batch import Timeline
from largebatch.batch.scaling import scaled_moments
from largebatch.config.data import Data, TextData
from largebatch.config.models import Model
from largebatch.config.optimizers import (
    AnyOptimizer,
    OptimizerSection,
    WithScaledBetas,
    registered_optimizers,
    show_optimizers_of,
)
from largebatch.config.sections import (
    Batch,
    BatchGrowth,
    Checkpoint,
    Compute,
    Duration,
    Evaluation,
    Faults,
    LearningRate,
    Logging,
    NonNegativeInt,
    Section,
    StepDecay,
    Train,
    WarmupStableDecay,
)
from largebatch.task_folders import folder_of, owner_of

Check = Callable[[Any], Iterator[str]]


def check(method: Check) -> Check:
    """Mark a method of a config as a check of fields against each other.

    It yields problems, one line each, that begin with the path of the field to change: "data.block_size: 512 is more
    than …; write …". A check that reads a field that is itself wrong or missing is left out, so that one error lists
    the problems of fields and those between fields.
    """
    method._is_check = True  # type: ignore[attr-defined]
    return method


class RecipeConfig(Section):
    """What every recipe's JSON has."""

    model_config = ConfigDict(validate_by_name=False)

    schema_: str | None = Field(default=None, alias="$schema")
    """Path of the JSON Schema, for editors."""
    seed: NonNegativeInt = 0
    """Initial weights, sample order, augmentation and dropout all follow from it."""
    precision: Literal["fp32", "bf16", "fp64"]
    """"fp32"; "bf16": matrix products in bfloat16 under autocast; weights, gradients and their reduction in fp32; or
    "fp64", slow, to see differences that are not rounding errors (not on DeepSpeed ZeRO)."""
    data: Data
    model: Model
    batch: Batch
    learning_rate: LearningRate
    optimizer: Annotated[OptimizerSection, AnyOptimizer()]
    train: Train
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    compute: Compute = Compute()
    logging: Logging = Logging()
    debug_model: dict[str, Any] | None = None
    """Fields of the model section, with values that make it small: what `largebatch verify` rehearses instead of a
    large model. Null rehearses the model as it is."""

    free_on_resume: ClassVar[tuple[str, ...]] = ()
    """Fields of a task's own, such as those of its evaluation, that a resumed run may change: they never change the
    training."""
    _built_with: ClassVar[list[type[OptimizerSection]]] = []

    @classmethod
    def with_optimizers(cls) -> type[Self]:
        """This class, taking all optimizers that are registered for its task by now; plans see these from now on."""
        show_optimizers_of(owner_of(cls.__module__))
        sections = [entry.section for entry in registered_optimizers()]
        if cls._built_with != sections:
            cls.model_rebuild(force=True)
            cls._built_with = sections
        return cls

    @classmethod
    def checks(cls) -> Iterator[Check]:
        """All methods marked by `check`, those of parent classes first."""
        for parent in reversed(cls.__mro__):
            for name, value in vars(parent).items():
                if getattr(value, "_is_check", False) and getattr(cls, name) is value:
                    yield value

    # --- what a task may say of itself ----------------------------------------------------------------------------

    @property
    def task(self) -> str:
        """The name of the task's folder."""
        folder = folder_of(type(self).__module__)
        return folder.name if folder else type(self).__name__

    @property
    def couples_the_batch(self) -> bool:
        """Whether the loss of a sample depends on all others of its global batch."""
        return False

    @property
    def tokens_processed_per_sample(self) -> int | None:
        """Tokens that a transformer processes for each training sample, for `mfu`; None if there are none, or unequal
        numbers."""
        data = self.data
        return data.block_size if isinstance(data, TextData) and data.tokens_per_sample is not None else None

    def tiny_data(self) -> dict[str, Any] | None:
        """Overrides, by their dotted paths, that put small data in place of the recipe's own, for `verify --tiny-data`.

        The small data must be there on every machine, and be of the same kind. None: the recipe's own are so.
        """
        return None

    # --- checks across the sections that all tasks have -----------------------------------------------------------

    @check
    def _checkpoints_to_roll_back_to(self) -> Iterator[str]:
        if self.faults.on_non_finite == "roll_back" and self.checkpoint.every is None:
            yield (
                'checkpoint.every: "roll_back" of faults.on_non_finite needs checkpoints to go back to; write a '
                'distance, such as {"steps": 100}'
            )

    @check
    def _whole_micro_batches(self) -> Iterator[str]:
        micro = self.batch.micro_batch_size
        size = next((size for _, size in self.batch.sizes if size % micro), None)
        if size is not None:
            below = size // micro * micro
            nearest = ", ".join(str(near) for near in (below, below + micro) if near > 0)
            yield (
                f"batch.global_batch_size: {size} is not a multiple of batch.micro_batch_size {micro}; nearest: "
                f"{nearest}"
            )

    @check
    def _batches_that_batch_norm_takes(self) -> Iterator[str]:
        if not self.batch.drop_last and self.model.uses_batch_norm:
            yield (
                "batch.drop_last: false would normalize the last micro-batch of an epoch over fewer samples than "
                "others, which for a model with BatchNorm is another loss; write true"
            )

    @check
    def _others_in_the_batch(self) -> Iterator[str]:
        if self.couples_the_batch and min(size for _, size in self.batch.sizes) == 1:
            yield (
                "batch.global_batch_size: 1 sample has no others to be told from, and so no gradient; write at least 2"
            )

    @check
    def _compiled_blocks_run_once(self) -> Iterator[str]:
        if self.compute.compile and self.compute.activation_checkpointing and self.model.uses_batch_norm:
            yield (
                "compute.compile: torch.compile stops at blocks with BatchNorm that are computed again, and leaves "
                "most of the model as it is; write false, or false as compute.activation_checkpointing"
            )

    @check
    def _growth_instead_of_decay(self) -> Iterator[str]:
        sizes = [size for _, size in self.batch.sizes]
        if isinstance(self.learning_rate.decay, BatchGrowth) and max(sizes) == sizes[0]:
            yield (
                'learning_rate.decay: "batch_growth" leaves the decay to a batch that grows, and this one does not; '
                'write a list of sizes as batch.global_batch_size, or another decay, such as {"name": "cosine"}'
            )

    @check
    def _betas_within_their_rule(self) -> Iterator[str]:
        optimizer, rate, sizes = self.optimizer, self.learning_rate, [size for _, size in self.batch.sizes]
        if not isinstance(optimizer, WithScaledBetas) or optimizer.beta_scaling == "fixed":
            return
        path, rule = "optimizer.beta_scaling", f'"{optimizer.beta_scaling}"'
        if optimizer.beta_scaling == "sde" and rate.scaling != "sqrt":
            yield (
                f'{path}: {rule} goes with the square-root rule; write "sqrt" as learning_rate.scaling, or "fixed" here'
            )
        if len(set(sizes)) > 1:
            yield (
                f"{path}: {rule} would change betas with the batch size, which Adam's bias correction does not allow "
                'for; write "fixed", or a global_batch_size that does not grow'
            )
            return
        try:
            scaled_moments(optimizer.beta_scaling, sizes[0] / rate.reference_batch_size, optimizer.betas, optimizer.eps)
        except ValueError as error:
            yield f'{path}: {rule}: {error}; write a smaller batch, or "fixed"'

    @check
    def _durations_within_the_run(self) -> Iterator[str]:
        sizes, num_samples = self.batch.sizes, self.data.num_train_samples
        largest = max(size for _, size in sizes)
        if largest > num_samples:
            yield (
                f"batch.global_batch_size: {largest} is more than the {num_samples} training samples, so there is no "
                f"whole batch in an epoch; write at most {num_samples}"
            )
            return
        try:
            timeline = Timeline.build(num_samples, sizes, not self.batch.drop_last, self.data.tokens_per_sample)
        except ValueError as error:
            yield f"batch.global_batch_size: {error}"
            return
        for path, duration in (
            ("evaluation.every", self.evaluation.every),
            ("checkpoint.every", self.checkpoint.every),
            ("checkpoint.keep_every", self.checkpoint.keep_every),
        ):
            _, problem = _steps(timeline, path, duration)
            yield from problem
        total, problem = _steps(timeline, "train.duration", self.train.duration)
        yield from problem
        if total is None:
            return
        end = min(self.train.stop_after_steps or total, total)
        profile = self.logging.profile
        if profile is not None and profile.last_step > end:
            yield (
                f"logging.profile.last_step: {profile.last_step} is beyond the last step of the run, {end}; write "
                "steps within it"
            )
        last_phase = timeline.phases[-1]
        if last_phase.first_step >= total:
            yield (
                f"batch.global_batch_size: the size {last_phase.global_batch_size} comes into force at step "
                f"{last_phase.first_step}, not within the run of {total} steps; leave it out, or lengthen "
                "train.duration"
            )
        yield from _rates_outside_the_run(self.learning_rate, timeline, total)


def _steps(timeline: Timeline, path: str, duration: Duration | None) -> tuple[int | None, list[str]]:
    """The duration in steps if it can be counted so, and the problem if not."""
    if duration is None:
        return None, []
    try:
        return timeline.steps_in(duration.length), []
    except ValueError as error:
        return None, [f"{path}: {error}"]


def _rates_outside_the_run(rate: LearningRate, timeline: Timeline, total: int) -> Iterator[str]:
    """What is wrong with warmup and decay in a run of `total` steps."""
    warmup_steps, problem = _steps(
        timeline, "learning_rate.warmup.duration", rate.warmup.duration if rate.warmup else None
    )
    yield from problem
    if rate.warmup and warmup_steps is not None and warmup_steps > total:
        yield (
            f"learning_rate.warmup.duration: {rate.warmup.duration.length} are {warmup_steps} steps, longer than the "
            f"whole run of {total}; shorten it, or lengthen train.duration"
        )
        return
    if isinstance(rate.decay, StepDecay):
        previous = 0
        for number, milestone in enumerate(rate.decay.at):
            path = f"learning_rate.decay.at[{number}]"
            at, problem = _steps(timeline, path, milestone)
            yield from problem
            if at is None:
                continue
            given = f"{path}: {milestone.length} is step {at}"
            if at <= previous:
                yield f"{given}, not after step {previous}; write them in increasing order"
            if at >= total:
                yield f"{given}, not within the run of {total} steps; leave it out or lower it"
            previous = at
    if isinstance(rate.decay, WarmupStableDecay):
        path = "learning_rate.decay.decay"
        try:
            start = timeline.steps_before(total, rate.decay.decay.length)
        except ValueError as error:
            yield f"{path}: {error}"
            return
        if start is None or start < (warmup_steps or 0):
            yield (
                f"{path}: {rate.decay.decay.length} of decay after {warmup_steps or 0} steps of warmup are longer than "
                f"the whole run of {total} steps; shorten one of them"
            )
