"""The sections that every recipe's JSON has, whatever its task: one typed model each, one sentence a field."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from largebatch.batch import Length, Unit

# Bounds far beyond any use: what is larger would overflow in torch, or to infinity.
LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 1e12

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the config: types are not coerced, unknown keys are errors, values cannot be changed afterwards."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Moment(Section):
    """A moment of training, in exactly one unit from its start."""

    epochs: NonNegativeFloat | None = None
    """Passes over the training set."""
    steps: NonNegativeInt | None = None
    """Optimizer steps."""
    samples: NonNegativeInt | None = None
    """Training samples."""
    tokens: NonNegativeInt | None = None
    """Training tokens; only where every sample has `block_size` of them."""

    @model_validator(mode="after")
    def _exactly_one_unit(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError('give exactly one of epochs, steps, samples, tokens, for example {"epochs": 5}')
        return self

    @property
    def length(self) -> Length:
        """The amount and its unit."""
        units: tuple[Unit, ...] = ("epochs", "steps", "samples", "tokens")
        return next(Length(unit, getattr(self, unit)) for unit in units if getattr(self, unit) is not None)


class Duration(Moment):
    """A length of training, in exactly one unit; converted to whole optimizer steps once, in the plan (rounded up)."""

    epochs: Annotated[float, Field(ge=1e-6, le=LARGEST_FLOAT)] | None = None
    """Passes over the training set."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    samples: PositiveInt | None = None
    """Training samples."""
    tokens: PositiveInt | None = None
    """Training tokens; only where every sample has `block_size` of them."""


class BatchPhase(Section):
    """A batch size, and when it comes into force."""

    from_: Annotated[Moment, Field(alias="from")]
    """When; the first one at 0."""
    size: PositiveInt
    """Samples per optimizer step over all processes."""


MOST_PHASES = 1000


class LinearRamp(Section):
    """A batch size that grows from `start` to `end` by `increment` after each of equal parts of `over`."""

    start: PositiveInt
    """Batch size at the start of training."""
    end: PositiveInt
    """Batch size from the end of the ramp on."""
    increment: PositiveInt
    """What the batch size grows by each time; a multiple of micro_batch_size x the processes of the largest job."""
    over: Duration
    """Length of the ramp, from the start of training."""

    @model_validator(mode="after")
    def _whole_increments(self) -> Self:
        growth = self.end - self.start
        if growth <= 0:
            raise ValueError(f"a ramp grows, but end {self.end} is not above start {self.start}; write a list of sizes")
        if growth % self.increment:
            raise ValueError(
                f"from start {self.start} the increment {self.increment} does not lead to end {self.end}; write an end "
                f"such as {self.start + max(1, growth // self.increment) * self.increment}"
            )
        if growth // self.increment > MOST_PHASES:
            raise ValueError(
                f"increment {self.increment} makes {growth // self.increment} batch sizes from {self.start} to "
                f"{self.end}; write an increment that makes at most {MOST_PHASES}"
            )
        return self


def _kind_of_batch_size(value: Any) -> str:
    return "list" if isinstance(value, list) else "ramp" if isinstance(value, dict | LinearRamp) else "number"


GlobalBatchSize = Annotated[
    Annotated[PositiveInt, Tag("number")]
    | Annotated[list[BatchPhase], Field(min_length=1), Tag("list")]
    | Annotated[LinearRamp, Tag("ramp")],
    Discriminator(_kind_of_batch_size),
]


class Batch(Section):
    """The batch: two inputs, from which the number of accumulation steps follows for any number of processes."""

    global_batch_size: GlobalBatchSize
    """Samples per optimizer step over all processes: a number, a list such as [{"from": {"steps": 0}, "size": 64},
    {"from": {"epochs": 5}, "size": 256}], or a linear ramp."""
    micro_batch_size: PositiveInt
    """Samples per process per forward pass. With BatchNorm it is part of the loss function (Goyal et al. 2017, 2.3)."""
    drop_last: bool = True
    """Whether the samples at the end of an epoch that do not fill a global batch are dropped, others in each epoch; if
    not, they are a smaller global batch whose loss is the mean over those it has."""

    @model_validator(mode="after")
    def _list_starts_at_zero(self) -> Self:
        if isinstance(self.global_batch_size, list) and self.global_batch_size[0].from_.length.amount != 0:
            raise ValueError(
                f"global_batch_size[0].from is {self.global_batch_size[0].from_.length}; the first batch size begins "
                'with training: write {"steps": 0}'
            )
        return self

    @property
    def sizes(self) -> list[tuple[Length, int]]:
        """The batch sizes and the moments, from the start of training, at which they come into force."""
        size = self.global_batch_size
        if isinstance(size, int):
            return [(Length("steps", 0), size)]
        if isinstance(size, list):
            return [(phase.from_.length, phase.size) for phase in size]
        over, increments = size.over.length, (size.end - size.start) // size.increment
        parts = [over.exact * number / increments for number in range(increments + 1)]
        amounts = [float(part) if over.unit == "epochs" else math.ceil(part) for part in parts]
        return [
            (Length(over.unit, amount), size.start + number * size.increment) for number, amount in enumerate(amounts)
        ]


class Warmup(Section):
    """Lower learning rates at the start of training (Goyal et al. 2017, section 2.2)."""

    duration: Duration
    """How long they are lower than the peak."""
    start: Literal["base_lr", "zero"] = "base_lr"
    """Where they start: at `base_lr` (Goyal et al.; no warmup where the scaled rate is not above it), or at zero."""
    shape: Literal["gradual", "constant"] = "gradual"
    """"gradual": the rate grows by the same amount at each step. "constant": it stays at `base_lr`, and jumps to the
    peak afterwards, which the paper compares with, and finds worse than no warmup."""

    @model_validator(mode="after")
    def _constant_is_not_zero(self) -> Self:
        if self.shape == "constant" and self.start == "zero":
            raise ValueError(
                'a constant warmup at zero would not train; write "base_lr" as start, or "gradual" as shape'
            )
        return self


class ConstantDecay(Section):
    """The peak learning rate until the end."""

    name: Literal["constant"]


class StepDecay(Section):
    """The learning rate is multiplied by `factor` at each of the milestones."""

    name: Literal["step"]
    at: Annotated[list[Duration], Field(min_length=1)]
    """Milestones, from the start of training, in increasing order."""
    factor: Annotated[float, Field(gt=0, lt=1)]
    """What the learning rate is multiplied by at each milestone."""


class CosineDecay(Section):
    """Half a cosine from the peak, where warmup ends, to `final_fraction` of it at the end of training."""

    name: Literal["cosine"]
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class LinearDecay(Section):
    """A straight line from the peak, where warmup ends, to `final_fraction` of it at the end of training."""

    name: Literal["linear"]
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class PolynomialDecay(Section):
    """The peak times a power of the part that is left, from where warmup ends to the end of training; to
    `final_fraction`. You et al. 2017 (arXiv 1708.03888) use it with LARS, with the power 2."""

    name: Literal["polynomial"]
    power: PositiveFloat
    """The power; 1 is a straight line."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class WarmupStableDecay(Section):
    """The peak until `decay` before the end, then a straight line to `final_fraction` of it (WSD, arXiv 2404.06395)."""

    name: Literal["warmup_stable_decay"]
    decay: Duration
    """Length of the decay at the end of training."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""


class BatchGrowth(Section):
    """The peak learning rate of the first batch size until the end: the batch grows instead of the rate decaying.

    For SGD, a batch f times as large changes the noise of training as a rate divided by f does (Smith et al. 2018,
    arXiv 1711.00489): for a step decay by 0.2, write a `global_batch_size` that is a list whose sizes grow fivefold.
    """

    name: Literal["batch_growth"]


Decay = Annotated[
    ConstantDecay | StepDecay | CosineDecay | LinearDecay | PolynomialDecay | WarmupStableDecay | BatchGrowth,
    Field(discriminator="name"),
]


class LearningRate(Section):
    """The learning rate that was tuned, and how it follows the batch size."""

    base_lr: PositiveFloat
    """The learning rate that was tuned."""
    reference_batch_size: PositiveInt
    """The global batch size `base_lr` was tuned at; there is no default, because a guess would scale wrongly."""
    scaling: Literal["linear", "sqrt", "none"]
    """With k = global_batch_size / reference_batch_size, the peak is base_lr times k, the square root of k, or 1."""
    warmup: Warmup | None = None
    """Gradual warmup, or null for none."""
    decay: Decay
    """What the learning rate does after warmup."""


class Train(Section):
    """How long to train."""

    duration: Duration
    """Length of the whole run; the learning rate's decay ends with it."""
    stop_after_steps: PositiveInt | None = None
    """Stop early after this many steps, with the plan (and so the learning rate) of the whole run."""


class Evaluation(Section):
    """When to evaluate; the end of the run is always evaluated."""

    every: Duration | None = None
    """Distance between evaluations; null is only at the end."""
    max_samples: PositiveInt | None = None
    """Evaluate on the first so many samples only; null is all of them."""


class Checkpoint(Section):
    """When to write checkpoints, and which to keep; there is always one at the end, and one on request to stop."""

    every: Duration | None = None
    """Distance between checkpoints; null is only at the end and on request."""
    keep_last: PositiveInt | None = 2
    """How many of the newest complete checkpoints are kept; null is all."""
    keep_every: Duration | None = None
    """Distance between checkpoints that are kept for ever, besides those, and written where `every` has none; null is
    none."""
    asynchronous: bool = True
    """Whether training goes on while a copy of the state is written; it needs room for that copy on the host."""


class Faults(Section):
    """What to do when something goes wrong."""

    on_non_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """When a loss or gradient is not finite: "stop" the run, found at the next logged step or checkpoint at the latest;
    "skip" the step's update; or "roll_back" to the last checkpoint and go on behind the step, without the samples in
    between. The last two look at the gradient's norm in every step, before the update."""
    max_bad_steps: PositiveInt = 10
    """Steps that may turn out so in the whole run before it stops."""
    hang_seconds: PositiveFloat | None = 1800.0
    """A process that makes no progress for so long writes its stack to the run folder, and the job ends; null is never.
    The longest step, evaluation batch or checkpoint must be shorter."""
    time_limit_margin_seconds: NonNegativeFloat = 300.0
    """How long before the end of a SLURM job's time limit the run stops by itself; time for two steps and a checkpoint.
    """


class Compute(Section):
    """How a step is computed: what it costs in time and memory, and nothing else."""

    compile: bool = False
    """Whether the model's repeated blocks, or the whole model where it has none, go through `torch.compile`. The first
    steps take longer, and losses differ by rounding."""
    activation_checkpointing: bool = False
    """Whether transformer and residual blocks keep their inputs only, and compute the rest again in the backward pass:
    one more forward pass of the blocks for much less memory."""


class ProfiledSteps(Section):
    """Steps that torch's profiler traces on every process."""

    first_step: PositiveInt
    """The first of them, counted from 1 as in metrics.jsonl."""
    last_step: PositiveInt
    """The last of them."""

    @model_validator(mode="after")
    def _at_least_one_step(self) -> Self:
        if self.last_step < self.first_step:
            raise ValueError(
                f"last_step {self.last_step} is before first_step {self.first_step}; write {self.first_step} or more"
            )
        return self


class Logging(Section):
    """What to write while training."""

    every: PositiveInt = 10
    """Steps between two lines of metrics.jsonl; the first and the last step always have one."""
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Trackers that get the same numbers, through Accelerate."""
    peak_tflops: PositiveFloat | None = None
    """What `mfu` is a fraction of: the peak of one process's device in the recipe's precision, dense, in 10^12
    floating-point operations a second; null is the GPU's data sheet, where its name is known."""
    profile: ProfiledSteps | None = None
    """Steps to trace, such as {"first_step": 11, "last_step": 13}: each process writes a Chrome trace into the run
    folder's `profile`. Traced steps are slower, and a trace of many is large; null is none."""
