"""The sections that every recipe's JSON has, besides `learning_rate`: a typed model each, with a sentence per field."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from largebatch.batch import Length, Unit
from largebatch.system.repositories import RepositoryKind

# Far beyond any use; larger values would overflow in torch, or to infinity.
MAX_INT = 2**63 - 1
MAX_FLOAT = 1e12

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
# Of a dimension of a tensor, and of a stack of layers; models that are larger are never built.
Size = Annotated[int, Field(gt=0, le=2**24)]
NumLayers = Annotated[int, Field(gt=0, le=1000)]
PositiveFloat = Annotated[float, Field(gt=0, le=MAX_FLOAT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_FLOAT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
NonEmptyList = Annotated[list[Item], Field(min_length=1)]


class Section(BaseModel):
    """A part of the config: types are not coerced, unknown keys are errors, and values cannot be changed afterward."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @property
    def hub_fields(self) -> dict[str, RepositoryKind]:
        """The fields that name a folder or a repository on the hub, with the kind of the repository."""
        return {}


class Moment(Section):
    """A moment of training, counted from its start in exactly one unit."""

    epochs: NonNegativeFloat | None = None
    """Passes over the training set."""
    steps: NonNegativeInt | None = None
    """Optimizer steps."""
    samples: NonNegativeInt | None = None
    """Training samples."""
    tokens: NonNegativeInt | None = None
    """Training tokens; only if every sample has `block_size` of them."""

    @model_validator(mode="after")
    def _exactly_one_unit(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(
                'give exactly one of epochs, steps, samples, tokens, as in {"epochs": 5}, on a command line, too'
            )
        return self

    @property
    def length(self) -> Length:
        """The amount and its unit."""
        ((unit, amount),) = self.model_dump(exclude_none=True).items()
        return Length(cast(Unit, unit), amount)


class Duration(Moment):
    """A length of training in exactly one unit; the plan converts it to whole optimizer steps, rounding up."""

    epochs: Annotated[float, Field(ge=1e-6, le=MAX_FLOAT)] | None = None
    """Passes over the training set."""
    steps: PositiveInt | None = None
    """Optimizer steps."""
    samples: PositiveInt | None = None
    """Training samples."""
    tokens: PositiveInt | None = None
    """Training tokens; only if every sample has `block_size` of them."""


def _steps_if_bare(value: Any) -> Any:
    return {"steps": value} if type(value) is int else value


DurationOrSteps = Annotated[Duration, BeforeValidator(_steps_if_bare, json_schema_input_type=Duration | PositiveInt)]


class BatchPhase(Section):
    """A batch size, and the moment from which it is used."""

    from_: Annotated[Moment, Field(alias="from")]
    """Moment from which the size is used; 0 for the first."""
    size: PositiveInt
    """Samples per optimizer step over all processes."""


MAX_PHASES = 1000


class LinearRamp(Section):
    """A batch size that grows from `start` to `end` by `increment`, at equal intervals over the duration `over`."""

    start: PositiveInt
    """Batch size at the start of training."""
    end: PositiveInt
    """Batch size from the end of the ramp on."""
    increment: PositiveInt
    """Growth of the batch size each time; a multiple of micro_batch_size x the processes of the largest job."""
    over: Duration
    """Length of the ramp, from the start of training."""

    @model_validator(mode="after")
    def _whole_increments(self) -> Self:
        count, rest = divmod(self.end - self.start, self.increment)
        if count < 1 or rest:
            given = f"increments of {self.increment} from start {self.start} do not reach end {self.end}"
            nearest = self.start + max(1, count) * self.increment
            raise ValueError(f"{given}; write an end such as {nearest}")
        if count > MAX_PHASES:
            raise ValueError(
                f"increment {self.increment} makes {count} batch sizes; write one that makes at most {MAX_PHASES}"
            )
        return self


def _kind_of_batch_size(value: Any) -> str:
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict | LinearRamp) else "integer"


GlobalBatchSize = Annotated[
    Annotated[PositiveInt, Tag("integer")]
    | Annotated[NonEmptyList[BatchPhase], Tag("array")]
    | Annotated[LinearRamp, Tag("object")],
    Discriminator(_kind_of_batch_size),
]


if TYPE_CHECKING:
    # What a task meets: a run and the tools replace "auto" first.
    MicroBatchSize = int
else:
    MicroBatchSize = Annotated[
        Annotated[Size, Tag("integer")] | Annotated[Literal["auto"], Tag("string")],
        Discriminator(lambda value: "string" if isinstance(value, str) else "integer"),
    ]


class Batch(Section):
    """The batch: two inputs, from which the gradient accumulation steps follow for any number of processes."""

    global_batch_size: GlobalBatchSize
    """Samples per optimizer step over all processes: a number, a list such as [{"from": {"steps": 0}, "size": 64},
    {"from": {"epochs": 5}, "size": 256}], or a linear ramp."""
    micro_batch_size: MicroBatchSize
    """Samples per process per forward pass; "auto": a size that fits into memory, which starts of the run find. With
    BatchNorm it is part of the loss function (Goyal et al. 2017, 2.3)."""
    drop_last: bool = True
    """Whether to drop the samples at the end of an epoch that do not fill a global batch (different ones in each
    epoch). If not, they form a smaller global batch, whose loss is the mean over its own samples."""

    @model_validator(mode="after")
    def _list_starts_at_zero(self) -> Self:
        start, _ = self.phases[0]
        if start.amount != 0:
            raise ValueError(f'global_batch_size[0].from: {start}, but training starts at 0; write {{"steps": 0}}')
        return self

    @property
    def finds_micro_batch_size(self) -> bool:
        """Whether the micro-batch size is "auto"."""
        return not isinstance(self.micro_batch_size, int)

    @property
    def sizes(self) -> list[int]:
        """The batch sizes in their order."""
        return [size for _, size in self.phases]

    @property
    def phases(self) -> list[tuple[Length, int]]:
        """The batch sizes, each with the moment from which it is used."""
        size = self.global_batch_size
        if isinstance(size, int):
            return [(Length("steps", 0), size)]
        if isinstance(size, list):
            return [(phase.from_.length, phase.size) for phase in size]
        over = size.over.length
        sizes = range(size.start, size.end + 1, size.increment)
        phases = []
        for number, each in enumerate(sizes):
            exact = over.exact * number / (len(sizes) - 1)
            amount = float(exact) if over.unit == "epochs" else math.ceil(exact)
            phases.append((Length(over.unit, amount), each))
        return phases


class Train(Section):
    """How long to train."""

    duration: Duration
    """Length of the whole run; the decay of the learning rate ends with it."""
    stop_after_steps: PositiveInt | None = None
    """Stop early after this many steps; the learning rate is still planned for the whole run."""


class EvalSet(Section):
    """When to evaluate a set of samples, and on how many of them; the end of the run is always evaluated."""

    every: Duration | None = None
    """Interval between evaluations; null means only at the end."""
    max_samples: PositiveInt | None = None
    """Number of evaluation samples, from the start of the set; of a mixture, from its first sources. null: all."""

    def samples_of(self, size: int) -> int:
        """The number of samples to evaluate of a set of this size."""
        return min(self.max_samples or size, size)


class Evaluation(EvalSet):
    """When to evaluate; the end of the run is always evaluated."""

    sets: dict[Annotated[str, Field(pattern=r"^[\w+-]+$")], EvalSet] = {}
    """Further sets that the task's train.py evaluates, by the name that it gives them, such as
    {"shifted": {"every": {"epochs": 1}}}."""


class KeepBest(Section):
    """Which evaluation is the best."""

    metric: NonEmpty = "loss"
    """Its name in evaluations.jsonl."""
    mode: Literal["min", "max"]
    """Whether the lowest or the highest value is the best."""


class Checkpoint(Section):
    """When to write checkpoints, and which to keep; the end of a run and a request to stop always write one."""

    every: Duration | None = None
    """Interval between checkpoints; null means only at the end, when asked to stop, and as `keep_every` and
    `keep_best` say."""
    keep_last: PositiveInt | None = 2
    """Number of the latest complete checkpoints to keep; null means all."""
    keep_every: Duration | None = None
    """Interval between checkpoints that are never deleted, and written even where `every` has none; null means none."""
    keep_best: KeepBest | None = None
    """Writes a checkpoint after each evaluation that is better than all before, and deletes it only when a better one
    is complete. null: none."""
    then: NonEmptyList[NonEmpty] | None = None
    """A command, word by word, that the main process runs beside training for each checkpoint that `keep_every` or
    `keep_best` keeps, and for the last. `{model}` stands for a folder with the exported weights, deleted afterwards,
    `{step}` for the step. Numbers in its last line that is a JSON object go into evaluations.jsonl as "then/<name>"."""
    then_seconds: NonNegativeFloat = 600.0
    """How long a run that is finished waits for the command, which it then ends."""
    asynchronous: bool = True
    """Whether training continues while a copy of the state is written; the copy needs host memory."""


class Spike(Section):
    """Which finite gradients count as spikes."""

    sigmas: PositiveFloat = 6.0
    """Standard deviations above the mean of the norms at which a spike begins."""
    window: Annotated[int, Field(ge=2, le=1000)] = 128
    """Number of latest applied steps whose norms, before clipping, are compared with; before as many, nothing is."""


class Faults(Section):
    """What to do when something goes wrong."""

    on_non_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """Reaction to a loss or gradient that is not finite: "stop" the run, at the next logged step or checkpoint at the
    latest; "skip" the step's update; or "roll_back" to the latest checkpoint and continue after the step, without
    the samples in between. The last two check the norm of the gradient in every step, before the update."""
    max_bad_steps: PositiveInt = 10
    """Number of such steps that the whole run may have; one more stops it."""
    spike: Spike | None = None
    """Treats a step whose gradient has a norm far above those of earlier steps like one that is not finite; with
    `on_non_finite` "stop", the run ends before its update. Checks the norm in every step. null: never."""
    hang_seconds: PositiveFloat | None = 1800.0
    """A process that makes no progress for this long writes its stack to the run folder, and the job ends; null means
    never, except that processes wait at most two days for each other. The longest step and evaluation batch must be
    shorter; checkpoints and the final weights need not be, as long as one tensor after the other is written."""
    time_limit_margin_seconds: NonNegativeFloat = 300.0
    """Seconds before the time limit of a Slurm job at which the run stops by itself: enough for four steps and a
    checkpoint."""


class Compute(Section):
    """How a step is computed; this affects its time and memory and, apart from rounding, nothing else."""

    compile: Literal["auto", "on", "blocks", "model", "off"] = "auto"
    """What to `torch.compile`. "auto", on GPUs, and "on", everywhere: the whole model if each process holds all of its
    weights and it is a network of convolutions, has fewer than 50 million parameters or repeats no blocks; otherwise
    its blocks. "auto" leaves out what cannot be compiled. "blocks" and "model": only the blocks, or the whole model.
    The first steps take longer, and losses differ by rounding. If compiling fails, training continues without, on all
    processes alike, with a warning."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What transformer and residual blocks recompute in the backward pass instead of keeping it. "full": everything but
    their inputs, which needs the least memory, at the cost of one more forward pass of the blocks. "selective": neither
    matrix products, nor convolutions, nor attention, whose results are kept, so that little time is lost."""
    channels_last: bool = False
    """Whether images are laid out with their channels last (NHWC), which tensor cores need for convolutions."""
    attention: (
        Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"] | None
    ) = None
    """How models of `transformers` compute attention: its `attn_implementation`, which decides what each of them needs.
    null: its default, which is "sdpa" for most. If the documents of a sample are kept apart, "sdpa" and "eager" need a
    mask whose memory grows with the square of the sample's tokens, "flex_attention" (GPUs only) skips the tokens of
    other documents, and the others are refused, because the documents would see each other."""
    gather_in_bf16: bool = True
    """Whether FSDP gathers the weights of linear and convolutional layers in bf16 under precision "bf16". Autocast
    casts them to bf16 anyway, so this halves the bytes, and losses and gradients are the same to the last bit. A model
    that uses such a weight in fp32 is refused."""
    reduce_gradients: Literal["auto", "each_micro_batch", "last_micro_batch"] = "auto"
    """When fsdp and hsdp sum gradients over the processes that share the weights: with each micro-batch, so that a
    process keeps only its shard, or with the last, so that it keeps whole gradients and sends none until then. "auto":
    fsdp sums with the last, unless that needs more than 60 % of the GPU's memory; hsdp sums with each, because that
    stays within the node. Other strategies have no choice."""
    couple: Literal["auto", "one_pass", "two_passes"] = "auto"
    """How often a step encodes each sample for a loss over the whole global batch. "one_pass": once, which takes one
    micro-batch per process. "two_passes": first all micro-batches without gradients, then each again. "auto": once
    where there is one micro-batch per process."""
    deterministic: bool = False
    """Whether to use only kernels that give the same bits each time. This is slower on GPUs, and operations without
    such a kernel raise an error. CPUs give the same bits in any case."""


class NoiseScaleSection(Section):
    """When to measure the gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162)."""

    every: DurationOrSteps
    """Interval between two measurements; a bare number is in steps."""


class Logging(Section):
    """What to log while training."""

    every: DurationOrSteps = Duration(steps=10)
    """Interval between two lines of metrics.jsonl, by default 10 steps; the first and the last step always have one. A
    bare number is in steps. In {"samples": 4096}, runs at different batch sizes have comparable curves."""
    noise_scale: NoiseScaleSection | None = None
    """When to measure the gradient noise scale, such as {"every": 10}, from the gradients of the micro-batches; null
    means never. A loss that couples samples of different micro-batches, or BatchNorm, is refused."""
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Trackers that get the same numbers, through Accelerate. Both show all starts as one run."""
    tracker_project: NonEmpty = "largebatch"
    """Project of the run in W&B."""
    peak_tflops: PositiveFloat | None = None
    """The peak that `mfu` is a fraction of: dense TFLOP/s of one process's device in the recipe's precision; null uses
    the GPU's data sheet, if its name is known."""


class Expected(Section):
    """A figure that was published for exactly these settings. An override of a field that affects training removes it,
    unless the field only says where the data is, or is the seed."""

    metric: NonEmpty
    """Name of the number in evaluations.jsonl."""
    value: float
    """The mean over the seeds; or, with `reached`, the target."""
    spread: NonNegativeFloat
    """Standard deviation over the seeds: of the value or, with `reached`, of `after`, in its unit."""
    seeds: PositiveInt
    """Number of runs; one has no spread."""
    after: Duration
    """When the value was measured or, with `reached`, the mean over the seeds of when the target was reached."""
    reached: Literal["at_least", "at_most"] | None = None
    """null: runs had the same length, and the value differs. "at_least" or "at_most": each run ended with the first
    evaluation at which the metric was at least, or at most, the value, and the length differs."""
    source: NonEmpty
    """Where it was published."""
