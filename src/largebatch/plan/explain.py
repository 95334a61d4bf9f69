"""A plan in words: what each process loads, what is averaged over what, and why the learning rate is what it is."""

from collections.abc import Collection, Mapping
from typing import Any

from largebatch.batch import Length
from largebatch.batch.scaling import RULE_NAMES
from largebatch.errors import counted
from largebatch.plan.contract import RunPlan

MOST_LINES = 6
MOMENT_RULES = {
    "half_life": "the second beta's half-life in samples is kept",
    "sde": "they follow the square-root rule for Adam's moments",
}


def explain(plan: RunPlan, title: str, sections: Collection[str] | None = None) -> str:
    """The plan as text for a person, in lines of at most some 110 characters.

    Args:
        plan: The resolved plan.
        title: What the plan is of, for the first line.
        sections: Names of the sections to show; None is all.
    """
    lines = [heading(plan, title)]
    for name, body in bodies(plan):
        if sections is not None and name not in sections:
            continue
        lines += [f"  {name if number == 0 else '':<14}{line}" for number, line in enumerate(body)]
    return "\n".join(lines)


def heading(plan: RunPlan, title: str) -> str:
    """The first line: what is trained on how many processes."""
    return f"{title}: {plan.task} on {counted(plan.world_size, 'process', 'processes')}"


def bodies(plan: RunPlan) -> list[tuple[str, list[str]]]:
    """The sections: the name and the lines of each."""
    return [
        ("Batch", _batch(plan)),
        ("Loss", _loss(plan)),
        ("Steps", _steps(plan)),
        ("Learning rate", _learning_rate(plan)),
        ("Optimizer", _optimizer(plan)),
    ]


def _batch(plan: RunPlan) -> list[str]:
    phases = plan.timeline.phases
    if len(phases) == 1:
        per_process = plan.micro_batch_size * plan.gradient_accumulation_steps
        return [
            _division(plan, plan.global_batch_size),
            f"each process loads {counted(per_process, 'sample')} per step, {plan.micro_batch_size:,} at a time",
        ]
    lines = [
        f"from step {phase.first_step:,}: {_division(plan, phase.global_batch_size)}, "
        f"peak lr {plan.peak_lr_for(phase.global_batch_size):.6g}"
        for phase in phases
    ]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 2 : -1] = [f"… and {len(lines) - MOST_LINES + 1} sizes in between"]
    return lines


def _division(plan: RunPlan, global_batch_size: int) -> str:
    accumulation = plan.accumulation_of(global_batch_size)
    return (
        f"{counted(global_batch_size, 'sample')} per optimizer step = {plan.micro_batch_size:,} per micro-batch "
        f"x {accumulation:,} accumulated x {counted(plan.world_size, 'process', 'processes')}"
    )


def _loss(plan: RunPlan) -> list[str]:
    counts = "target tokens" if plan.loss_unit == "tokens" else plan.loss_unit
    if plan.loss_weight_per_sample is None:
        unit = f"all {counts}"
    elif len(plan.timeline.phases) > 1:
        unit = f"all {plan.loss_unit}"
    else:
        weight = plan.global_batch_size * plan.loss_weight_per_sample
        product = f" ({plan.global_batch_size:,} samples x {plan.loss_weight_per_sample:,})"
        unit = f"all {weight:,} {plan.loss_unit}{'' if plan.loss_unit == 'samples' else product}"
    lines = [
        f"loss and gradient are the mean over {unit} of the global batch,",
        "summed over micro-batches and processes and divided once, whatever the strategy",
    ]
    if plan.loss_weight_per_sample is None:
        lines.append(f"samples have unequal numbers of {counts}: they are counted over all processes before each step")
    if plan.coupled_loss:
        lines += [
            "each sample's loss depends on the whole global batch, whose features are computed first and gathered:",
            "another global_batch_size, also that of a smaller last batch, is another loss",
        ]
    if plan.sync_batch_norm:
        lines += [
            "BatchNorm normalizes over the micro-batches of all processes together, micro_batch_size x world_size =",
            f"{plan.micro_batch_size:,} x {plan.world_size:,} = {plan.micro_batch_size * plan.world_size:,} samples: "
            "another product is another loss",
        ]
    elif plan.uses_batch_norm:
        lines.append(
            f"BatchNorm normalizes each micro-batch of {plan.micro_batch_size:,} on its own: another "
            "micro_batch_size is another loss"
        )
    return lines


def _steps(plan: RunPlan) -> list[str]:
    timeline = plan.timeline
    lines = []
    if len(timeline.phases) == 1:
        steps = timeline.steps_in(Length("epochs", 1))
        used = timeline.at(steps).samples_before
        left = plan.num_train_samples % plan.global_batch_size
        rest = ""
        if left and timeline.keep_last:
            rest = f" (the last {left:,} are a smaller global batch, at the same learning rate)"
        elif left:
            rest = f" (the last {left:,} of each epoch's shuffle are dropped)"
        lines.append(
            f"one epoch is {counted(steps, 'step')}: {used:,} of {plan.num_train_samples:,} training samples{rest}"
        )
    else:
        rest = "a smaller global batch, at the same learning rate" if timeline.keep_last else "dropped"
        lines.append(f"samples at the end of an epoch that do not fill a global batch are {rest}")
    samples = timeline.at(plan.total_steps).samples_before
    tokens = f", {samples * plan.tokens_per_sample:,} tokens" if plan.tokens_per_sample else ""
    run = counted(plan.total_steps, "step")
    epochs = counted(float(timeline.progress(plan.total_steps, "epochs")), "epoch", form=".4g")
    lines.append(f"the run is {run} = {epochs} = {counted(samples, 'sample')}{tokens}")
    if plan.stop_after_steps < plan.total_steps:
        lines.append(f"it stops early, after step {plan.stop_after_steps:,}; the learning rate keeps to the whole run")
    when = f"every {plan.evaluate_every} and at the end" if plan.evaluate_every else "at the end"
    which = f"{plan.evaluated_samples:,}"
    if plan.evaluated_samples < plan.num_eval_samples:
        which = f"the first {plan.evaluated_samples:,} of {plan.num_eval_samples:,}"
    lines.append(f"evaluated {when} on {which} samples, each counted once")
    every = f"every {plan.checkpoint_every}, " if plan.checkpoint_every else ""
    kept = f"; every {plan.keep_checkpoint_every} one is kept for ever" if plan.keep_checkpoint_every else ""
    lines.append(f"checkpoint {every}at the end, and when the run is asked to stop{kept}")
    return lines


def _learning_rate(plan: RunPlan) -> list[str]:
    schedule = plan.schedule
    size = plan.scaled_batch_size or plan.global_batch_size
    this = "this is" if plan.scaled_batch_size is None else "this begins with"
    lines = [
        f"peak {plan.peak_lr:.6g} = {plan.base_lr:.6g} x {_formula(plan, size)}, by {RULE_NAMES[plan.scaling]}: "
        f"{plan.base_lr:.6g} was tuned at batch {plan.reference_batch_size:,}, {this} {size:,}"
    ]
    if schedule.warmup:
        steps = _steps_to(plan, schedule.warmup)
        epochs = float(plan.timeline.progress(steps, "epochs"))
        how_long = f"{counted(steps, 'step')} ({counted(epochs, 'epoch', form='.3g')})"
        one_peak = len(plan.timeline.phases) == 1 or plan.scaled_batch_size is not None
        goal = f"{plan.peak_lr:.6g}" if one_peak else "the peak of the batch size in force"
        if len(plan.timeline.phases) == 1 and not plan.timeline.keep_last:
            each = f", {(plan.peak_lr - schedule.warmup_start_lr) / steps:.3g} more each step"
        else:
            each = ", more with each sample"
        if schedule.warmup_shape == "constant":
            lines.append(f"warmup at {schedule.warmup_start_lr:.6g} for {how_long}, then {goal}")
        else:
            lines.append(f"warmup from {schedule.warmup_start_lr:.6g} to {goal} in {how_long}{each}")
    elif plan.warmup_left_out:
        lines.append(
            f"no warmup: it would start at base_lr {plan.base_lr:.6g}, which is not below the peak "
            '(start "zero" would warm up from 0)'
        )
    else:
        lines.append("no warmup")
    lines.append(_decay(plan))
    return lines


def _formula(plan: RunPlan, global_batch_size: int) -> str:
    k = global_batch_size / plan.reference_batch_size
    return {"linear": f"{k:.6g}", "sqrt": f"sqrt({k:.6g})", "none": "1"}[plan.scaling]


def _steps_to(plan: RunPlan, place: int) -> int:
    """Steps until `place` samples are trained on."""
    return plan.timeline.steps_in(Length("samples", place))


def _decay(plan: RunPlan) -> str:
    schedule = plan.schedule
    last = f"{plan.lr_at(plan.total_steps - 1):.3g} in the last step"
    if plan.scaled_batch_size is not None:
        growth = plan.global_batch_size / plan.scaled_batch_size
        return f"then constant: the batch grows {growth:g} fold, which for SGD is as if the rate were divided by it"
    if schedule.decay == "constant":
        return "then constant"
    if schedule.decay == "step":
        milestones = ", ".join(f"{_steps_to(plan, milestone):,}" for milestone in schedule.milestones)
        return f"then x {schedule.factor:g} at steps {milestones}; {last}"
    end = f"{schedule.final_fraction:g} of the peak at the end; {last}"
    if schedule.decay == "warmup_stable_decay":
        start = _steps_to(plan, schedule.decay_start)
        return f"then constant until step {start:,}, then a straight line to {end}"
    shape = {"cosine": "half a cosine", "linear": "a straight line"}.get(
        schedule.decay, f"a polynomial of power {schedule.power:g}"
    )
    return f"then {shape} to {end}"


def _optimizer(plan: RunPlan) -> list[str]:
    decay = f"weight decay {plan.weight_decay:g}"
    if plan.no_decay and plan.weight_decay:
        decay += f", none on {', '.join(plan.no_decay)} parameters"
    clipping = "no gradient clipping" if plan.clip_norm is None else f"gradients clipped to norm {plan.clip_norm:g}"
    master = (
        "bf16 autocast; weights, gradients and their reduction in fp32" if plan.precision == "bf16" else plan.precision
    )
    lines = [f"{plan.optimizer} with {_options(plan.optimizer_options)}; {decay}"]
    if plan.optimizer_explanation:
        lines.append(plan.optimizer_explanation + (f", {_exempt(plan)}" if plan.layerwise else ""))
    if plan.optimizer_options != plan.tuned_options:
        lines.append(
            f"{_options(plan.tuned_options)} were tuned at batch {plan.reference_batch_size:,}; "
            + MOMENT_RULES[plan.beta_scaling]
        )
    return [*lines, f"{clipping}; {master}; seed {plan.seed}"]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({', '.join(f'{number:g}' for number in value)})" if isinstance(value, tuple) else f"{name} {value}"
        for name, value in options.items()
    )


def _exempt(plan: RunPlan) -> str:
    return f"but not that of {', '.join(plan.no_decay)} parameters" if plan.no_decay else "without exception"
