"""The `RunPlan`: every number of the optimization, decided once from the config and the number of processes.

Nothing divides, scales or defaults after that: backends receive numbers from the plan and are checked against it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from pydantic import TypeAdapter

from largebatch.batch import GlobalBatch, Length, Timeline, gradient_accumulation_steps, micro_steps
from largebatch.batch.division import valid_micro_batch_sizes
from largebatch.batch.mixture import Mixture
from largebatch.batch.schedule import Schedule
from largebatch.config import RecipeConfig
from largebatch.config.learning_rate import (
    BatchGrowth,
    LearningRate,
    StepDecay,
    WarmupStableDecay,
)
from largebatch.config.optimizers import EMA, GroupOptions, OptimizerEntry, Shape
from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.config.sections import Checkpoint, Compute, Duration, EvalSet, Evaluation, Expected, Faults, Logging
from largebatch.errors import ConfigError, UserError

# Pairs of samples whose losses `Step.couple` computes at a time.
PAIRS_PER_TILE = 2**22
# Processes read a vote on stopping this many steps after they have begun it: over the hosts of hundreds of processes it
# takes as long as a short step.
STOP_VOTE_STEPS = 2
# A request during a step is in the vote of the next one.
STEPS_TO_STOP = STOP_VOTE_STEPS + 2


@dataclass(frozen=True)
class RunPlan:
    """The resolved numbers of a run, and the sections of the recipe that are followed as they are."""

    task: str  # name of the task's folder
    seed: int
    precision: str
    learning_rate: LearningRate
    optimizer: OptimizerSection  # the fields that every optimizer has, for this run; see `optimizer_options`, too
    evaluation: Evaluation  # the fields that every task has
    checkpoint: Checkpoint
    faults: Faults
    compute: Compute
    logging: Logging

    # What is known about the data, the model and the optimizer, whose sections differ between tasks.
    num_train_samples: int
    num_eval_samples: int
    loss_unit: str
    loss_weight_per_sample: int | None
    uses_batch_norm: bool  # whether `micro_batch_size` is part of the loss function (Goyal et al. 2017, section 2.3)
    sync_batch_norm: bool  # whether `micro_batch_size` x `world_size` is, instead
    coupled_features: int  # numbers per sample that the loss compares with those of the whole global batch; 0 for none

    # What is decided.
    world_size: int  # data-parallel processes: observed, never configured
    micro_batch_size: int
    max_global_batch_size: int  # samples per optimizer step over all processes; the largest number if it changes
    max_gradient_accumulation_steps: int  # micro-batches per process per optimizer step at that size
    max_peak_lr: float  # learning rate after warmup at that size
    timeline: Timeline  # the samples of each step, and the batch sizes
    mixture: Mixture | None  # the sources that the samples come from, if there are several
    total_steps: int
    stop_after_steps: int  # last step of this run: `total_steps`, or fewer if the recipe asks to stop early
    schedule: Schedule
    scaled_batch_size: int | None  # the first size, if the rate stays scaled to it; None scales to the current one
    # Momentum, betas and the like, as torch names them, for this batch size; a list in JSON is read as a tuple.
    optimizer_options: dict[str, tuple[Any, ...] | Any]

    # What the optimizer's section says of parameters by patterns of their names, for each of its fields.
    name_patterns: dict[str, dict[str, Any]]
    decay_explanation: str  # how weight decay is computed; empty if it is as tuned
    obstacle_to_compiling: str | None  # why the model cannot be compiled; None if nothing is known
    finds_micro_batch_size: bool  # whether a start after one that was out of memory takes a smaller one
    expected: Expected | None  # a published figure of these settings
    commits: dict[str, str] = field(default_factory=dict)  # those of a run's repositories; see `config.commits`

    # What is declared about the optimizer; it is code, so not in JSON, and None in a plan that was read from there.
    optimizer_entry: OptimizerEntry | None = field(default=None, compare=False)

    # --- for a step, counted from 0 -------------------------------------------------------------------------------

    def batch_at(self, step: int) -> GlobalBatch:
        """The samples of a step."""
        return self.timeline.at(step)

    @property
    def total_samples(self) -> int:
        """The samples that all steps train on."""
        return self.batch_at(self.total_steps).samples_before

    def micro_steps_of(self, batch: GlobalBatch) -> int:
        """Micro-batches that each process works through in a step; in a ragged one, the last may be short or empty."""
        return micro_steps(batch.size, self.micro_batch_size, self.world_size)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step."""
        return self.lr_of(self.batch_at(step))

    def lr_of(self, batch: GlobalBatch) -> float:
        """The learning rate for the global batch of a step, which `batch_at` returned."""
        return self.schedule.lr_at(batch.samples_before, self.peak_lr_for(batch.global_batch_size))

    def peak_lr_for(self, global_batch_size: int) -> float:
        """The learning rate after warmup at a batch size."""
        return self.learning_rate.peak_for(self.scaled_batch_size or global_batch_size)

    def ema_weight_at(self, step: int) -> float:
        """The weight with which the weights after a step enter their moving average; 0 if there is none.

        With the decay d = 0.5 ** (half-lives in the step) and D = 0.5 ** (half-lives so far), it is (1 - d) / (1 - D).
        The average is then the mean of the weights after each step so far, in which the starting weights do not count.
        """
        if self.optimizer.ema_half_life is None:
            return 0.0
        so_far = self.half_lives_in(step + 1)
        of_step = so_far - self.half_lives_in(step)
        return math.expm1(-math.log(2) * of_step) / math.expm1(-math.log(2) * so_far)

    def half_lives_in(self, steps: int) -> Fraction:
        """The half-lives of the moving average of the weights in the first `steps` steps."""
        assert self.optimizer.ema_half_life is not None
        half_life = self.optimizer.ema_half_life.length
        return self.timeline.progress(steps, half_life.unit) / half_life.exact

    def states_of(self, shape: Shape, group: GroupOptions) -> Mapping[str, Shape]:
        """The shapes of the states that the optimizer keeps for a tensor of a parameter group, by name; () means a
        scalar."""
        assert self.optimizer_entry is not None
        states = self.optimizer_entry.states({**self.optimizer_options, **group}, shape)
        return states if self.optimizer.ema_half_life is None else {**states, EMA: shape}

    def exchanges_layers(self, group: GroupOptions) -> bool:
        """Whether the optimizer puts the layers of a parameter group together, each on one process."""
        assert self.optimizer_entry is not None
        return self.optimizer_entry.needs == "whole layers" and bool(group["layerwise"])

    # --- after a number of completed steps ------------------------------------------------------------------------

    def evaluates_after(self, completed_steps: int, name: str | None = None) -> bool:
        """Whether an evaluation is due: of the evaluation set, or of the further set of this name."""
        return completed_steps == self.stop_after_steps or self._is_due(completed_steps, self.evaluation_of(name).every)

    def checkpoints_after(self, completed_steps: int) -> bool:
        """Whether a checkpoint is due; `keep_every` need not be a multiple of `every`."""
        return (
            completed_steps == self.stop_after_steps
            or self._is_due(completed_steps, self.checkpoint.every)
            or self.keeps_checkpoint_of(completed_steps)
        )

    def keeps_checkpoint_of(self, completed_steps: int) -> bool:
        """Whether the checkpoint is never deleted."""
        return self._is_due(completed_steps, self.checkpoint.keep_every)

    def logs_after(self, completed_steps: int) -> bool:
        """Whether metrics.jsonl gets a line: for the first step, the last, and as `logging.every` says."""
        return completed_steps in (1, self.stop_after_steps) or self._is_due(completed_steps, self.logging.every)

    def _is_due(self, completed_steps: int, every: Duration | None) -> bool:
        return every is not None and self.timeline.crosses_multiple(completed_steps, every.length)

    def evaluation_of(self, name: str | None) -> EvalSet:
        """When to evaluate the further set of this name, or the evaluation set; UserError if there is none."""
        if name is None:
            return self.evaluation
        if name not in self.evaluation.sets:
            what = f'evaluation.sets: the recipe has no "{name}", which train.py evaluates; add "{name}": {{}}'
            raise UserError(what, everywhere=True)
        return self.evaluation.sets[name]

    def measures_noise_after(self, completed_steps: int) -> bool:
        """Whether the last of the completed steps measures the gradient noise scale; one micro-batch has none."""
        section = self.logging.noise_scale
        is_due = section is not None and self._is_due(completed_steps, section.every)
        return is_due and self.batch_at(completed_steps - 1).size > self.micro_batch_size

    @property
    def coupled_numbers(self) -> int:
        """The numbers of all samples of a global batch that `Step.couple` gathers; 0 if it is not for this loss."""
        return self.max_global_batch_size * self.coupled_features

    def encodes_once(self, micro_steps: int) -> bool:
        """Whether `Step.couple` encodes samples once, and not twice, if each process has this many micro-batches."""
        return micro_steps == 1 and self.compute.couple != "two_passes"

    # --- on a kind of device --------------------------------------------------------------------------------------

    def compiles_on(self, kind: str) -> bool:
        """Whether the model is to be compiled on devices of this kind, such as "cuda"."""
        word = self.compute.compile
        if word == "auto":
            return kind == "cuda" and self.obstacle_to_compiling is None
        return word != "off"

    # --- as JSON --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The plan as indented JSON."""
        text = TypeAdapter(RunPlan).dump_json(self, indent=2, by_alias=True, exclude={"optimizer_entry"})
        return text.decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> "RunPlan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: The JSON is not a plan, or is from a different version.
        """
        return TypeAdapter(cls).validate_json(text)


def resolve(
    config: RecipeConfig, world_size: int, micro_batch_size: int | None = None, completed_steps: int = 0
) -> RunPlan:
    """Decide the whole optimization of a run.

    Args:
        config: A validated recipe of any task.
        world_size: Data-parallel processes of the job.
        micro_batch_size: Samples per process per forward pass; None means the recipe's own. If that is "auto", the plan
            has the largest size up to this one; None allows any.
        completed_steps: Steps that these processes need not take, because a checkpoint has them.

    Raises:
        ConfigError: A global batch that is still to come does not divide over these processes, or the model cannot be
            compiled on them.
    """
    data = config.data
    rate = config.learning_rate
    timeline = config.timeline
    sizes = config.batch.sizes
    total_steps = timeline.steps_in(config.train.duration.length)
    # A batch size is still to come if its phase does not end before the completed steps do.
    ends = [*(phase.first_step for phase in timeline.phases[1:]), total_steps + 1]
    # The last one at least: a checkpoint of a longer run is refused later.
    to_come = [size for size, end in zip(sizes, ends, strict=True) if end > min(completed_steps, total_steps)]
    if config.batch.finds_micro_batch_size:
        size = math.gcd(*to_come)
        found = valid_micro_batch_sizes(size, 1 + (micro_batch_size or size), world_size)
        # There is none if the batch does not divide over these processes, which is refused below.
        micro_batch_size = found[0] if found else 1
    micro_batch_size = micro_batch_size or config.batch.micro_batch_size
    accumulation = max(gradient_accumulation_steps(size, micro_batch_size, world_size) for size in to_come)
    if config.compute.couple == "one_pass" and accumulation > 1:
        raise ConfigError(
            f'compute.couple: "one_pass" takes one micro-batch per process, but there are {accumulation}; '
            'write "auto", or a larger batch.micro_batch_size'
        )
    obstacle = None
    if config.model.synchronizes_batch_norm and world_size > 1:
        obstacle = "BatchNorm communicates between processes"
    if obstacle and config.compute.compile not in ("auto", "off"):
        raise ConfigError(f'compute.compile: {obstacle}, which cannot be compiled; write "auto" or "off"')
    scaled_batch_size = sizes[0] if isinstance(rate.decay, BatchGrowth) else None
    max_peak_lr = rate.peak_for(scaled_batch_size or max(sizes))
    k = sizes[0] / rate.reference_batch_size
    optimizer = {name: getattr(config.optimizer, name) for name in OptimizerSection.model_fields}
    optimizer["weight_decay"], decay_explanation = config.optimizer.weight_decay_for(
        k, max_peak_lr / rate.base_lr, rate.horizon_of(timeline, total_steps)
    )
    return RunPlan(
        task=config.task,
        seed=config.seed,
        precision=config.precision,
        learning_rate=rate,
        optimizer=OptimizerSection(**optimizer),
        evaluation=Evaluation(**{name: getattr(config.evaluation, name) for name in Evaluation.model_fields}),
        checkpoint=config.checkpoint,
        faults=config.faults,
        compute=config.compute,
        logging=config.logging,
        num_train_samples=data.num_train_samples,
        num_eval_samples=data.num_eval_samples,
        loss_unit=data.loss_unit,
        loss_weight_per_sample=data.loss_weight_per_sample,
        uses_batch_norm=config.model.uses_batch_norm,
        sync_batch_norm=config.model.synchronizes_batch_norm,
        coupled_features=config.coupled_features,
        decay_explanation=decay_explanation,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        max_global_batch_size=max(sizes),
        max_gradient_accumulation_steps=accumulation,
        max_peak_lr=max_peak_lr,
        timeline=timeline,
        mixture=data.mixture,
        total_steps=total_steps,
        stop_after_steps=min(config.train.stop_after_steps or total_steps, total_steps),
        schedule=_schedule(rate, timeline, total_steps, max_peak_lr),
        scaled_batch_size=scaled_batch_size,
        optimizer_options=config.optimizer.options_for(k),
        name_patterns=config.optimizer.name_patterns,
        obstacle_to_compiling=obstacle,
        finds_micro_batch_size=config.batch.finds_micro_batch_size,
        expected=config.expected,
        optimizer_entry=config.optimizer_entry,
    )


def _schedule(rate: LearningRate, timeline: Timeline, total_steps: int, peak_lr: float) -> Schedule:
    def place_after(length: Length) -> int:
        return timeline.at(timeline.steps_in(length)).samples_before

    decay = rate.decay
    schedule = Schedule(
        end=timeline.at(total_steps).samples_before,
        decay="constant" if isinstance(decay, BatchGrowth) else decay.name,
        **decay.model_dump(include={"factor", "power", "final_fraction"}),
    )
    if rate.warmup is not None:
        start_lr = rate.base_lr if rate.warmup.start == "base_lr" else 0.0
        # Warmup leads from the tuned rate up to the scaled one, if that is higher (Goyal et al. 2017, section 5.1).
        warmup = place_after(rate.warmup.duration.length) if peak_lr > start_lr else 0
        schedule = replace(schedule, warmup=warmup, warmup_start_lr=start_lr, warmup_shape=rate.warmup.shape)
    if isinstance(decay, StepDecay):
        schedule = replace(schedule, milestones=tuple(place_after(each.length) for each in decay.at))
    decay_start = schedule.warmup
    if isinstance(decay, WarmupStableDecay):
        first_step = timeline.steps_before(total_steps, decay.decay.length)
        assert first_step is not None
        decay_start = timeline.at(first_step).samples_before
    return replace(schedule, decay_start=decay_start)
