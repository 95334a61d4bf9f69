"""The `RunPlan`: every number of the optimization, decided once from the config and the number of processes.

Nothing divides, scales or defaults after that: backends receive numbers from the plan and are checked against it.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from largebatch.batch import GlobalBatch, Length, Timeline, gradient_accumulation_steps, micro_steps
from largebatch.batch.mixture import Mixture
from largebatch.batch.scaling import MomentRule, ScalingRule, scaled_moments, scaling_factor
from largebatch.batch.schedule import Schedule
from largebatch.config import RecipeConfig
from largebatch.config.optimizers import OptimizerEntry, WithScaledBetas
from largebatch.config.sections import BatchGrowth, LearningRate, StepDecay, WarmupStableDecay
from largebatch.errors import ConfigError

# Processes read a vote on stopping this many steps after they have begun it: over the hosts of hundreds of processes it
# takes as long as a short step.
STOP_VOTE_STEPS = 2
# A request during a step is in the vote of the next one.
STEPS_TO_STOP = STOP_VOTE_STEPS + 2


@dataclass(frozen=True)
class RunPlan:
    """The resolved numbers of a run; fields named as in the recipe mean the same as there."""

    task: str  # name of the task's folder
    seed: int
    precision: str
    world_size: int  # data-parallel processes: observed, never configured
    micro_batch_size: int
    num_train_samples: int
    num_eval_samples: int
    timeline: Timeline  # the samples of each step, and the batch sizes
    mixture: Mixture | None  # the sources that the samples come from, if there are several
    total_steps: int
    stop_after_steps: int  # last step of this run: `total_steps`, or fewer if the recipe asks to stop early
    loss_unit: str
    tokens_per_sample: int | None
    loss_weight_per_sample: int | None
    base_lr: float
    reference_batch_size: int
    scaling: ScalingRule
    scaled_batch_size: int | None  # the first size, if the rate stays scaled to it; None scales to the current one
    warmup_left_out: bool  # whether warmup is skipped because the peak is not above its start
    schedule: Schedule
    uses_batch_norm: bool  # whether `micro_batch_size` is part of the loss function (Goyal et al. 2017, section 2.3)
    sync_batch_norm: bool  # whether `micro_batch_size` x `world_size` is, instead
    coupled_loss: bool  # whether the loss of a sample depends on all other samples of its global batch
    optimizer: str
    optimizer_explanation: str  # a line about the optimizer, which may be empty
    layerwise: bool  # whether the optimizer scales each layer's step by norms of the layer
    optimizer_options: dict[str, Any]  # momentum, betas and the like, as torch names them, for this batch size
    tuned_options: dict[str, Any]  # the same options as they were tuned, at `reference_batch_size`
    beta_scaling: MomentRule
    weight_decay: float
    no_decay: tuple[str, ...]
    clip_norm: float | None
    evaluate_every: Length | None
    evaluated_samples: int  # samples of each evaluation: the first of the evaluation set, or all
    log_every_steps: int
    checkpoint_every: Length | None
    keep_checkpoint_every: Length | None
    on_non_finite: Literal["stop", "skip", "roll_back"]
    max_bad_steps: int
    compile: bool
    activation_checkpointing: bool
    channels_last: bool
    gather_in_bf16: bool
    reduce_gradients: str
    deterministic: bool

    # What is declared about the optimizer; it is code, so not in JSON, and None in a plan that was read from there.
    optimizer_entry: OptimizerEntry | None = field(default=None, compare=False)

    # --- for a step, counted from 0 -------------------------------------------------------------------------------

    def batch_at(self, step: int) -> GlobalBatch:
        """The samples of a step."""
        return self.timeline.at(step)

    def micro_steps_at(self, step: int) -> int:
        """Micro-batches that each process works through in a step; in a ragged one, the last may be short or empty."""
        return self.micro_steps_of(self.batch_at(step))

    def micro_steps_of(self, batch: GlobalBatch) -> int:
        """The same for the global batch of a step."""
        return micro_steps(batch.size, self.micro_batch_size, self.world_size)

    def accumulation_of(self, global_batch_size: int) -> int:
        """Micro-batches per process per optimizer step at a batch size."""
        return gradient_accumulation_steps(global_batch_size, self.micro_batch_size, self.world_size)

    def lr_at(self, step: int) -> float:
        """The learning rate of a step."""
        return self.lr_of(self.batch_at(step))

    def lr_of(self, batch: GlobalBatch) -> float:
        """The same for the global batch of a step."""
        return self.schedule.lr_at(batch.samples_before, self.peak_lr_for(batch.global_batch_size))

    def peak_lr_for(self, global_batch_size: int) -> float:
        """The learning rate after warmup at a batch size."""
        return self.base_lr * scaling_factor(
            self.scaling, self.scaled_batch_size or global_batch_size, self.reference_batch_size
        )

    # --- after a number of completed steps ------------------------------------------------------------------------

    def evaluates_after(self, completed_steps: int) -> bool:
        """Whether an evaluation is due."""
        return completed_steps == self.stop_after_steps or self._is_due(completed_steps, self.evaluate_every)

    def checkpoints_after(self, completed_steps: int) -> bool:
        """Whether a checkpoint is due; those to keep need not be among the others, as every 25 steps and every 10."""
        at_end = completed_steps == self.stop_after_steps
        return at_end or any(
            self._is_due(completed_steps, every) for every in (self.checkpoint_every, self.keep_checkpoint_every)
        )

    def keeps_checkpoint_of(self, completed_steps: int) -> bool:
        """Whether the checkpoint is never deleted."""
        return self._is_due(completed_steps, self.keep_checkpoint_every)

    def _is_due(self, completed_steps: int, every: Length | None) -> bool:
        return every is not None and self.timeline.completes(completed_steps, every)

    # --- for the largest batch size -------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all processes; the largest number if it changes."""
        return max(phase.global_batch_size for phase in self.timeline.phases)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per process per optimizer step at `global_batch_size`."""
        return self.accumulation_of(self.global_batch_size)

    @property
    def peak_lr(self) -> float:
        """The learning rate after warmup at `global_batch_size`."""
        return self.peak_lr_for(self.global_batch_size)

    def to_json(self) -> str:
        """The plan as indented JSON, with the numbers of the largest batch size."""
        numbers = dataclasses.asdict(self)
        del numbers["optimizer_entry"]
        for name in ("global_batch_size", "gradient_accumulation_steps", "peak_lr"):
            numbers[name] = getattr(self, name)
        return json.dumps(numbers, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "RunPlan":
        """The plan that `to_json` wrote.

        Raises:
            ValueError: It is not a plan, or is from a different version.
        """
        plan = TypeAdapter(cls).validate_json(text)
        # JSON has lists in place of tuples.
        for options in (plan.optimizer_options, plan.tuned_options):
            options.update({name: tuple(value) for name, value in options.items() if isinstance(value, list)})
        return plan


def resolve(config: RecipeConfig, world_size: int, micro_batch_size: int | None = None) -> RunPlan:
    """Decide the whole optimization of a run.

    Args:
        config: A validated recipe of any task.
        world_size: Data-parallel processes of the job.
        micro_batch_size: Samples per process per forward pass; None means the recipe's own.

    Raises:
        ConfigError: A global batch does not divide over these processes, or the model cannot be compiled on them.
    """
    batch, rate, data = config.batch, config.learning_rate, config.data
    if micro_batch_size is not None:
        batch = batch.model_copy(update={"micro_batch_size": micro_batch_size})
    accumulation = max(gradient_accumulation_steps(size, batch.micro_batch_size, world_size) for _, size in batch.sizes)
    if config.compute.compile and config.model.uses_batch_norm:
        _check_compiled_batch_norm(config, world_size, accumulation)
    timeline = Timeline.build(data.samples_of_an_epoch, batch.sizes, not batch.drop_last, data.tokens_per_sample)
    total_steps = timeline.steps_in(config.train.duration.length)
    scaled_batch_size = batch.sizes[0][1] if isinstance(rate.decay, BatchGrowth) else None
    schedule = _schedule(rate, timeline, total_steps, scaled_batch_size)
    entry = config.optimizer_entry
    tuned_options = config.optimizer.options
    optimizer_options = tuned_options
    beta_scaling: MomentRule = "fixed"
    if isinstance(config.optimizer, WithScaledBetas):
        beta_scaling = config.optimizer.beta_scaling
        betas, eps = scaled_moments(
            beta_scaling, batch.sizes[0][1] / rate.reference_batch_size, config.optimizer.betas, config.optimizer.eps
        )
        optimizer_options = tuned_options | {"betas": betas, "eps": eps}
    return RunPlan(
        task=config.task,
        seed=config.seed,
        precision=config.precision,
        world_size=world_size,
        micro_batch_size=batch.micro_batch_size,
        num_train_samples=data.num_train_samples,
        num_eval_samples=data.num_eval_samples,
        timeline=timeline,
        mixture=data.mixture(timeline),
        total_steps=total_steps,
        stop_after_steps=min(config.train.stop_after_steps or total_steps, total_steps),
        loss_unit=data.loss_unit,
        tokens_per_sample=data.tokens_per_sample,
        loss_weight_per_sample=data.loss_weight_per_sample,
        base_lr=rate.base_lr,
        reference_batch_size=rate.reference_batch_size,
        scaling=rate.scaling,
        scaled_batch_size=scaled_batch_size,
        warmup_left_out=rate.warmup is not None and schedule.warmup == 0,
        schedule=schedule,
        uses_batch_norm=config.model.uses_batch_norm,
        sync_batch_norm=config.model.synchronizes_batch_norm,
        coupled_loss=config.couples_the_batch,
        optimizer=config.optimizer.name,
        optimizer_explanation=entry.explanation,
        layerwise=entry.needs == "norms of layers",
        optimizer_options=optimizer_options,
        tuned_options=tuned_options,
        beta_scaling=beta_scaling,
        weight_decay=config.optimizer.weight_decay,
        no_decay=tuple(config.optimizer.no_decay),
        clip_norm=config.optimizer.clip_norm,
        evaluate_every=config.evaluation.every.length if config.evaluation.every else None,
        evaluated_samples=min(config.evaluation.max_samples or data.num_eval_samples, data.num_eval_samples),
        log_every_steps=config.logging.every,
        checkpoint_every=config.checkpoint.every.length if config.checkpoint.every else None,
        keep_checkpoint_every=config.checkpoint.keep_every.length if config.checkpoint.keep_every else None,
        on_non_finite=config.faults.on_non_finite,
        max_bad_steps=config.faults.max_bad_steps,
        compile=config.compute.compile,
        activation_checkpointing=config.compute.activation_checkpointing,
        channels_last=config.compute.channels_last,
        gather_in_bf16=config.compute.gather_in_bf16,
        reduce_gradients=config.compute.reduce_gradients,
        deterministic=config.compute.deterministic,
        optimizer_entry=entry,
    )


def _check_compiled_batch_norm(config: RecipeConfig, world_size: int, accumulation: int) -> None:
    if config.model.synchronizes_batch_norm and world_size > 1:
        raise ConfigError(
            "compute.compile: BatchNorm over all processes communicates inside the blocks to compile; write false, or "
            "set model.sync_batch_norm to false, which changes the loss"
        )
    if accumulation > 1:
        raise ConfigError(
            f"compute.compile: BatchNorm's running statistics move by a different factor in each of {accumulation} "
            "accumulated micro-batches, so the model would be recompiled for each; write false, or start "
            f"{accumulation * world_size} processes"
        )


def _schedule(rate: LearningRate, timeline: Timeline, total_steps: int, scaled_batch_size: int | None) -> Schedule:
    def place_after(length: Length) -> int:
        return timeline.at(timeline.steps_in(length)).samples_before

    warmup, warmup_start_lr = 0, 0.0
    if rate.warmup is not None:
        warmup_start_lr = rate.base_lr if rate.warmup.start == "base_lr" else 0.0
        largest = max(phase.global_batch_size for phase in timeline.phases)
        peak_lr = rate.base_lr * scaling_factor(rate.scaling, scaled_batch_size or largest, rate.reference_batch_size)
        # Warmup leads from the tuned rate up to the scaled one, if that is higher (Goyal et al. 2017, section 5.1).
        warmup = place_after(rate.warmup.duration.length) if peak_lr > warmup_start_lr else 0
    decay, decay_start = rate.decay, warmup
    if isinstance(decay, WarmupStableDecay):
        first_step = timeline.steps_before(total_steps, decay.decay.length)
        assert first_step is not None
        decay_start = timeline.at(first_step).samples_before
    milestones, factor = (decay.at, decay.factor) if isinstance(decay, StepDecay) else ([], 1.0)
    return Schedule(
        end=timeline.at(total_steps).samples_before,
        warmup=warmup,
        warmup_start_lr=warmup_start_lr,
        warmup_shape=rate.warmup.shape if rate.warmup is not None else "gradual",
        decay="constant" if isinstance(decay, BatchGrowth) else decay.name,
        final_fraction=getattr(decay, "final_fraction", 0.0),
        power=getattr(decay, "power", 1.0),
        milestones=tuple(place_after(milestone.length) for milestone in milestones),
        factor=factor,
        decay_start=decay_start,
    )
