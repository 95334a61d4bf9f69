"""The `RunPlan`: every number of the optimisation, decided once from the config and the number of processes.

After it exists, nothing divides, scales or defaults again: backends receive numbers from it and are checked against it.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from largebatch.batch import gradient_accumulation_steps
from largebatch.config.sections import StepDecay, WarmupStableDecay
from largebatch.config.tasks import RecipeConfig
from largebatch.config.units import StepUnits
from largebatch.scaling import ScalingRule, scaling_factor
from largebatch.schedule import Schedule


@dataclass(frozen=True)
class RunPlan:
    """The resolved numbers of a run. Counts are per run or per optimizer step, as their names say."""

    task: str
    seed: int
    precision: str
    world_size: int
    """Data-parallel processes: observed, never configured."""
    global_batch_size: int
    """Samples per optimizer step over all processes."""
    micro_batch_size: int
    """Samples per process per forward pass."""
    gradient_accumulation_steps: int
    """Micro-batches per process per optimizer step."""
    samples_per_process: int
    """Samples that each process loads per optimizer step."""
    num_train_samples: int
    num_eval_samples: int
    steps_per_epoch: int
    dropped_samples_per_epoch: int
    """Samples at the end of each epoch's shuffled order that do not fill a global batch; others in each epoch."""
    total_steps: int
    stop_after_steps: int
    """Last step of this run: `total_steps`, or fewer where the recipe asks to stop early."""
    tokens_per_sample: int | None
    """Tokens that each sample contributes to the loss; None where the loss is averaged over samples."""
    loss_weight_per_step: int
    """What the sum of losses over the global batch is divided by: its samples, or its tokens."""
    base_lr: float
    reference_batch_size: int
    scaling: ScalingRule
    scaling_factor: float
    warmup_left_out: bool
    """Whether the recipe's warmup has nothing to bridge, because the peak is not above where it would start."""
    schedule: Schedule
    uses_batch_norm: bool
    """Whether `micro_batch_size` is part of the loss function (Goyal et al. 2017, section 2.3)."""
    optimizer: Literal["sgd", "adamw"]
    optimizer_options: dict[str, Any]
    """Momentum, betas and the like, under torch's names."""
    weight_decay: float
    no_decay: tuple[str, ...]
    clip_norm: float | None
    """Global norm that gradients are clipped to; None is no clipping."""
    evaluate_every_steps: int | None
    """Steps between evaluations; None is only at the end."""
    log_every_steps: int

    @property
    def peak_lr(self) -> float:
        """Learning rate after warmup: `base_lr` times `scaling_factor`."""
        return self.schedule.peak_lr

    @property
    def loss_unit(self) -> str:
        """What the loss is a mean over: "samples" or "tokens"."""
        return "samples" if self.tokens_per_sample is None else "tokens"

    def to_json(self) -> str:
        """The plan as indented JSON, `peak_lr` and `loss_unit` included."""
        derived = {"peak_lr": self.peak_lr, "loss_unit": self.loss_unit}
        return json.dumps(dataclasses.asdict(self) | derived, indent=2) + "\n"


def resolve(config: RecipeConfig, world_size: int) -> RunPlan:
    """Decide the whole optimisation of a run.

    Args:
        config: A validated recipe of any task.
        world_size: Data-parallel processes of the job.

    Raises:
        ConfigError: The global batch does not divide over this many processes.
    """
    batch, rate, data = config.batch, config.learning_rate, config.data
    accumulation = gradient_accumulation_steps(batch.global_batch_size, batch.micro_batch_size, world_size)
    units = StepUnits(batch.global_batch_size, data.num_train_samples, data.tokens_per_sample)
    total_steps = units.steps_in(config.train.duration)
    factor = scaling_factor(rate.scaling, batch.global_batch_size, rate.reference_batch_size)
    schedule = _schedule(config, units, total_steps, peak_lr=rate.base_lr * factor)
    return RunPlan(
        task=config.task,
        seed=config.seed,
        precision=config.precision,
        world_size=world_size,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        samples_per_process=batch.micro_batch_size * accumulation,
        num_train_samples=data.num_train_samples,
        num_eval_samples=data.num_eval_samples,
        steps_per_epoch=units.steps_per_epoch,
        dropped_samples_per_epoch=data.num_train_samples - units.steps_per_epoch * batch.global_batch_size,
        total_steps=total_steps,
        stop_after_steps=min(config.train.stop_after_steps or total_steps, total_steps),
        tokens_per_sample=data.tokens_per_sample,
        loss_weight_per_step=batch.global_batch_size * (data.tokens_per_sample or 1),
        base_lr=rate.base_lr,
        reference_batch_size=rate.reference_batch_size,
        scaling=rate.scaling,
        scaling_factor=factor,
        warmup_left_out=rate.warmup is not None and schedule.warmup_steps == 0,
        schedule=schedule,
        uses_batch_norm=config.model.uses_batch_norm,
        optimizer=config.optimizer.name,
        optimizer_options=config.optimizer.model_dump(exclude={"name", "weight_decay", "no_decay", "clip_norm"}),
        weight_decay=config.optimizer.weight_decay,
        no_decay=tuple(config.optimizer.no_decay),
        clip_norm=config.optimizer.clip_norm,
        evaluate_every_steps=units.steps_in(config.evaluation.every) if config.evaluation.every else None,
        log_every_steps=config.logging.every,
    )


def _schedule(config: RecipeConfig, units: StepUnits, total_steps: int, peak_lr: float) -> Schedule:
    rate, decay = config.learning_rate, config.learning_rate.decay
    warmup_steps, warmup_start_lr = 0, 0.0
    if rate.warmup is not None:
        warmup_start_lr = rate.base_lr if rate.warmup.start == "base_lr" else 0.0
        # Warmup bridges from the tuned rate up to the scaled one; where scaling does not raise it, there is nothing to
        # bridge (Goyal et al. 2017, section 5.1: warmup "for kn > 256").
        warmup_steps = units.steps_in(rate.warmup.duration) if peak_lr > warmup_start_lr else 0
    return Schedule(
        peak_lr=peak_lr,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        warmup_start_lr=warmup_start_lr if warmup_steps else peak_lr,
        decay=decay.name,
        final_fraction=getattr(decay, "final_fraction", 0.0),
        milestones=tuple(units.steps_in(milestone) for milestone in decay.at) if isinstance(decay, StepDecay) else (),
        factor=decay.factor if isinstance(decay, StepDecay) else 1.0,
        decay_steps=units.steps_in(decay.decay) if isinstance(decay, WarmupStableDecay) else 0,
    )
