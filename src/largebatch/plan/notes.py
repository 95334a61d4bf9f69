"""Notes on a plan that would run, but perhaps not as well as was meant; they never refuse anything."""

from collections.abc import Iterator

from largebatch.batch import Length
from largebatch.config import RecipeConfig
from largebatch.config.data import HubOrLocal, TextData
from largebatch.plan.contract import RunPlan
from largebatch.words import counted

MIN_STEPS = 500
MIN_WARMUP_STEPS = 20
MIN_SCALED_BETA = 0.5
MIN_STEPS_OF_AN_EPOCH = 100  # of a loss over the whole global batch
MAX_PASSES = 4
"""Passes over the same text that are almost as good as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""


def notes_on(config: RecipeConfig, plan: RunPlan, critical_batch: float | None = None) -> Iterator[str]:
    """One line each; for a recipe that is a demonstration, none but that of a critical batch that was given.

    Args:
        config: The recipe.
        plan: Its plan.
        critical_batch: The critical batch size of this training in samples, if it is known.
    """
    if critical_batch is not None and plan.max_global_batch_size > critical_batch:
        times = 1 + plan.max_global_batch_size / critical_batch
        yield f"beyond the critical batch, the same loss takes {times:.3g} times the fewest samples (arXiv 1812.06162)"
    if config.demonstration:
        return
    timeline = plan.timeline
    rate = "learning_rate.warmup.duration"
    is_pretrained = config.model.read_in_parts_from or getattr(config.model, "initial_weights", None)
    if plan.total_steps < MIN_STEPS and not is_pretrained:
        yield f"{plan.total_steps:,} steps are few to train from random weights; a smaller batch takes more of them"
    warmup = timeline.steps_in(Length("samples", plan.schedule.warmup)) if plan.schedule.warmup else MIN_WARMUP_STEPS
    if warmup < MIN_WARMUP_STEPS:
        yield f"{counted(warmup, 'step')} of warmup are few for averages over gradients to settle; lengthen {rate}"
    steps_of_an_epoch = plan.num_train_samples // plan.max_global_batch_size
    if plan.coupled_features and steps_of_an_epoch < MIN_STEPS_OF_AN_EPOCH:
        steps = counted(steps_of_an_epoch, "step")
        share = f"{100 * plan.max_global_batch_size / plan.num_train_samples:.0f} % of the data"
        yield f"an epoch has {steps}, each with {share}; a smaller batch takes more of them"
    betas = plan.optimizer_options.get("betas", ())
    if getattr(config.optimizer, "beta_scaling", "fixed") != "fixed" and min(betas) < MIN_SCALED_BETA:
        yield f"optimizer.beta_scaling: with a beta of {min(betas):.3g}, Adam hardly averages; it is for small k"
    if plan.optimizer.ema_half_life is not None and plan.half_lives_in(plan.total_steps) < 1:
        yield "optimizer.ema_half_life is longer than the run, so first weights count over half as much as the last"
    for name, every in {"evaluation": plan.evaluation.every, "checkpoint": plan.checkpoint.every}.items():
        if every is None or timeline.steps_in(every.length) >= plan.total_steps:
            lost = "; a run that is killed starts over" if name == "checkpoint" else ""
            yield f"no {name} before the end{lost}: write a shorter {name}.every"
    spike = plan.faults.spike
    if spike and spike.window >= plan.total_steps:
        yield f"faults.spike compares no step before step {spike.window + 1:,}, after the end; write a smaller window"
    for name, data in (config.data.sections() or {"": config.data}).items():
        if isinstance(data, HubOrLocal) and data.evaluates_training_rows:
            yield f"{name and f'{name}: '}evaluation reads rows that are trained on; give it a split of its own"
    if isinstance(config.data, TextData) and config.data.tokens_per_sample == config.data.block_size:
        samples = plan.total_samples
        passes = max(plan.mixture.epochs(samples)) if plan.mixture else samples / plan.num_train_samples
        if passes > MAX_PASSES:
            yield f"text is read {passes:.3g} times; more than {MAX_PASSES} passes add little (arXiv 2305.16264)"
