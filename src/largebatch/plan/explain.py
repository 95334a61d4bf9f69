"""A plan in words: how the batch is divided, what the loss is a mean over, and where the learning rate comes from."""

from collections.abc import Iterable, Mapping
from typing import Any

from largebatch.batch import Length, micro_steps
from largebatch.batch.mixture import Mixture
from largebatch.config.sections import EvalSet
from largebatch.plan.contract import STEPS_TO_STOP, RunPlan
from largebatch.plan.expected import describe_figure
from largebatch.words import counted

MAX_LINES = 6
AUTO = '"auto": starts of the run find the largest that fits into memory; `plan --gpu-memory` estimates it'


def explain(plan: RunPlan, title: str, notes: Iterable[str] = ()) -> str:
    """The plan as readable text, in lines of about 110 characters or fewer.

    Args:
        plan: The resolved plan.
        title: Title of the first line, such as the recipe's name.
        notes: Lines to add, of `notes_on`.
    """
    lines = [f"{title}: {plan.task} on {counted(plan.world_size, 'process')}"]
    bodies = {
        "Batch": _batch(plan),
        "Micro-batch": [AUTO] if plan.finds_micro_batch_size else [],
        "Loss": _loss(plan),
        "Steps": _steps(plan),
        "Learning rate": _learning_rate(plan),
        "Optimizer": _optimizer(plan),
        "Compiling": _compiling(plan),
        "Expected": describe_figure(plan.expected) if plan.expected else [],
        "Notes": list(notes),
    }
    for name, body in bodies.items():
        lines += [f"  {name if number == 0 else '':<14}{line}" for number, line in enumerate(body)]
    return "\n".join(lines)


def _batch(plan: RunPlan) -> list[str]:
    phases = plan.timeline.phases
    if len(phases) == 1:
        return [_division(plan, plan.max_global_batch_size)]
    lines = [
        f"from step {phase.first_step:,}: {_division(plan, phase.global_batch_size)}, "
        f"peak lr {plan.peak_lr_for(phase.global_batch_size):.6g}"
        for phase in phases
    ]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 2 : -1] = [f"… and {len(lines) - MAX_LINES + 1} sizes in between"]
    return lines


def _division(plan: RunPlan, global_batch_size: int) -> str:
    processes = counted(plan.world_size, "process")
    if global_batch_size % (plan.micro_batch_size * plan.world_size):
        return f"{counted(global_batch_size, 'sample')} per optimizer step, taken before there were {processes}"
    accumulation = micro_steps(global_batch_size, plan.micro_batch_size, plan.world_size)
    return (
        f"{counted(global_batch_size, 'sample')} per optimizer step = {plan.micro_batch_size:,} per micro-batch "
        f"x {accumulation:,} accumulated x {processes}"
    )


def _loss(plan: RunPlan) -> list[str]:
    weight = plan.loss_weight_per_sample
    unit = "target tokens" if weight is None and plan.loss_unit == "tokens" else plan.loss_unit
    count = f"{plan.max_global_batch_size * weight:,} " if weight and len(plan.timeline.phases) == 1 else ""
    lines = [
        f"loss and gradient are the mean over all {count}{unit} of the global batch,",
        "summed over micro-batches and processes and divided once, whatever the strategy",
    ]
    if weight is None:
        lines.append(f"samples have different numbers of {unit}, which are counted over all processes before each step")
    if plan.coupled_features:
        is_once = plan.encodes_once(plan.max_gradient_accumulation_steps)
        often = "once" if is_once else "twice, first without gradients,"
        lines += [
            "each sample's loss depends on the whole global batch: changing global_batch_size changes the loss",
            f"each sample is encoded {often} per step, and compared with all {plan.max_global_batch_size:,}",
        ]
    if plan.uses_batch_norm:
        of = "micro_batch_size"
        size = plan.micro_batch_size
        if plan.sync_batch_norm:
            of = "micro_batch_size x world_size"
            size = size * plan.world_size
        lines.append(f"BatchNorm normalizes over {of} = {size:,} samples: changing it changes the loss")
    return lines


def _steps(plan: RunPlan) -> list[str]:
    timeline = plan.timeline
    samples = plan.total_samples
    amount = counted(samples, "sample")
    if timeline.tokens_per_sample:
        amount += f", {samples * timeline.tokens_per_sample:,} tokens"
    if plan.mixture is None:
        lines = _epoch(plan)
        epochs = float(timeline.progress(plan.total_steps, "epochs"))
        amount = f"{counted(epochs, 'epoch', form='.4g')} = {amount}"
    else:
        lines = _sources(plan, plan.mixture)
    lines.append(f"the run is {counted(plan.total_steps, 'step')} = {amount}")
    if plan.stop_after_steps < plan.total_steps:
        lines.append(f"it stops early, after step {plan.stop_after_steps:,}, on the whole run's learning-rate schedule")
    of = plan.num_eval_samples
    evaluated = plan.evaluation.samples_of(of)
    lines.append(f"evaluated {_when(plan.evaluation)} on {evaluated:,} of {of:,} samples, each counted once")
    for name, each in plan.evaluation.sets.items():
        lines.append(f'"{name}" evaluated {_when(each)}')
    checkpoint = plan.checkpoint
    every = f"every {checkpoint.every.length}, " if checkpoint.every else ""
    keep = checkpoint.keep_best
    best = f"after each {'lowest' if keep.mode == 'min' else 'highest'} {keep.metric} so far, " if keep else ""
    kept = f"; one every {checkpoint.keep_every.length} is never deleted" if checkpoint.keep_every else ""
    lines.append(
        f"checkpoint {every}{best}at the end, and at most {STEPS_TO_STOP} steps and 1 s after a stop request{kept}"
    )
    return lines + _noise_scale(plan)


def _noise_scale(plan: RunPlan) -> list[str]:
    if (section := plan.logging.noise_scale) is None:
        return []
    if plan.max_global_batch_size <= plan.micro_batch_size:
        return ["gradient noise scale not measured: it takes 2 micro-batches per step; lower batch.micro_batch_size"]
    bias = "; biased if the gradients of samples depend on their weights" if plan.loss_weight_per_sample is None else ""
    return [f"gradient noise scale measured every {section.every.length}{bias}"]


def _when(evaluated: EvalSet) -> str:
    return f"every {evaluated.every.length} and at the end" if evaluated.every else "at the end"


def _epoch(plan: RunPlan) -> list[str]:
    """Samples that an epoch trains on, and what is done with those left at its end."""
    timeline = plan.timeline
    rest = "a smaller one, at the same learning rate" if timeline.keep_last else "dropped"
    rest = f"what does not fill a global batch at the end of an epoch is {rest}"
    if len(timeline.phases) > 1:
        return [rest]
    steps = timeline.steps_in(Length("epochs", 1))
    used = timeline.at(steps).samples_before
    return [f"one epoch is {counted(steps, 'step')}: {used:,} of {plan.num_train_samples:,} training samples", rest]


def _sources(plan: RunPlan, mixture: Mixture) -> list[str]:
    """What each source of a mixture contributes, and how often it is seen."""
    counts = mixture.counts_after(plan.total_samples)
    return [
        f"{name}: {100 * weight / sum(mixture.weights):.3g} % of each batch, {counted(count, 'sample')}: "
        f"{counted(count / size, 'pass', form='.3g')} over its {size:,}"
        for name, size, weight, count in zip(mixture.names, mixture.sizes, mixture.weights, counts, strict=True)
    ]


def _steps_to(plan: RunPlan, place: int) -> int:
    """Steps until this many samples are trained on."""
    return plan.timeline.steps_in(Length("samples", place))


def _learning_rate(plan: RunPlan) -> list[str]:
    rate = plan.learning_rate
    size = plan.scaled_batch_size or plan.max_global_batch_size
    return [
        f"peak {plan.max_peak_lr:.6g} = {rate.base_lr:.6g} x {plan.max_peak_lr / rate.base_lr:.6g} (scaling "
        f"{rate.scaling}): {rate.base_lr:.6g} was tuned at batch {rate.reference_batch_size:,}; this one is {size:,}",
        _warmup(plan),
        _decay(plan),
    ]


def _warmup(plan: RunPlan) -> str:
    schedule = plan.schedule
    warmup = plan.learning_rate.warmup
    if warmup is None:
        return "no warmup"
    if schedule.warmup == 0:
        return f"no warmup: it would start at base_lr {plan.learning_rate.base_lr:.6g}, and the peak is not higher"
    how_long = counted(_steps_to(plan, schedule.warmup), "step")
    if schedule.warmup_shape == "constant":
        return f"warmup at {schedule.warmup_start_lr:.6g} for {how_long}, then the peak"
    return f"warmup from {schedule.warmup_start_lr:.6g} to the peak in {how_long}"


def _decay(plan: RunPlan) -> str:
    schedule = plan.schedule
    if schedule.decay == "constant":
        return "then constant" if plan.scaled_batch_size is None else "then constant, while the batch grows"
    last = f"{plan.lr_at(plan.total_steps - 1):.3g} in the last step"
    if schedule.decay == "step":
        milestones = ", ".join(f"{_steps_to(plan, milestone):,}" for milestone in schedule.milestones)
        return f"then x {schedule.factor:g} at steps {milestones}; {last}"
    first = _steps_to(plan, schedule.decay_start) if schedule.decay_start else 0
    end = f"{schedule.final_fraction:g} x the peak at the end; {last}" if schedule.final_fraction else f"0; {last}"
    if schedule.decay == "warmup_stable_decay":
        return f"then constant until step {first:,}, then linear, down to {end}"
    power = f" of power {schedule.power:g}" if schedule.decay == "polynomial" else ""
    return f"then {schedule.decay}{power} from step {first:,}, down to {end}"


def _optimizer(plan: RunPlan) -> list[str]:
    optimizer = plan.optimizer
    decay = f"weight decay {optimizer.weight_decay:.6g}"
    exempt = [*optimizer.no_decay, *optimizer.no_decay_names]
    if exempt and optimizer.weight_decay:
        decay += f", none on {', '.join(exempt)} parameters"
    lines = [f"{optimizer.name} with {_options(plan.optimizer_options)}; {decay}"]
    if plan.decay_explanation:
        lines.append(f"weight decay = {plan.decay_explanation}")
    for field, patterns in plan.name_patterns.items():
        if patterns and field not in optimizer.names:
            lines.append(f"{field}: {_options(patterns)}")
    for group in optimizer.groups or ():
        lines.append(f"{group.parameters}: {group.lr_factor:g} x the learning rate")
    if optimizer.ema_half_life is not None:
        of_step = float(plan.half_lives_in(1))
        decay = f"{counted(1 / of_step, 'step', ',.4g')}, a decay of {0.5**of_step:.6g} per step"
        at_first = " at the first batch size" if len(plan.timeline.phases) > 1 else ""
        lines.append(f"moving average of the weights: half-life {optimizer.ema_half_life.length} = {decay}{at_first}")
    clip_norm = optimizer.clip_norm
    clipping = "no gradient clipping" if clip_norm is None else f"gradients clipped to norm {clip_norm:g}"
    in_bf16 = "bf16 autocast; weights, gradients and their reduction in fp32"
    return [*lines, f"{clipping}; {in_bf16 if plan.precision == 'bf16' else plan.precision}; seed {plan.seed}"]


def _compiling(plan: RunPlan) -> list[str]:
    if not plan.compiles_on("cuda"):
        return [f"the model is not compiled: {plan.obstacle_to_compiling or 'compute.compile is off'}"]
    where = "" if plan.compiles_on("cpu") else " on GPUs"
    return [f"the model is compiled{where}, and the first step takes longer"]


def _options(options: Mapping[str, Any]) -> str:
    shown = []
    for name, value in options.items():
        if isinstance(value, tuple):
            value = f"({', '.join(format(number, 'g') for number in value)})"
        shown.append(f"{name} {value}")
    return ", ".join(shown)
