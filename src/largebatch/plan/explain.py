"""A plan in words: what each process loads, what is averaged over what, and why the learning rate is what it is."""

from largebatch.plan.contract import RunPlan


def explain(plan: RunPlan, title: str) -> str:
    """The plan as text for a person, in lines of at most some 110 characters.

    Args:
        plan: The resolved plan.
        title: What the plan is of, for the first line.
    """
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size:,} processes"
    sections = [
        ("Batch", _batch(plan)),
        ("Loss", _loss(plan)),
        ("Steps", _steps(plan)),
        ("Learning rate", _learning_rate(plan)),
        ("Optimizer", _optimizer(plan)),
    ]
    lines = [f"{title}: {plan.task} on {processes}"]
    for name, body in sections:
        lines += [f"  {name if number == 0 else '':<14}{line}" for number, line in enumerate(body)]
    return "\n".join(lines)


def _batch(plan: RunPlan) -> list[str]:
    return [
        f"{plan.global_batch_size:,} samples per optimizer step = {plan.micro_batch_size:,} per micro-batch "
        f"x {plan.gradient_accumulation_steps:,} accumulated x {plan.world_size:,} processes",
        f"each process loads {plan.samples_per_process:,} samples per step, {plan.micro_batch_size:,} at a time",
    ]


def _loss(plan: RunPlan) -> list[str]:
    if plan.tokens_per_sample is None:
        unit = f"all {plan.global_batch_size:,} samples"
    else:
        tokens = f"{plan.global_batch_size:,} samples x {plan.tokens_per_sample:,}"
        unit = f"all {plan.loss_weight_per_step:,} tokens ({tokens})"
    lines = [
        f"loss and gradient are the mean over {unit} of the global batch,",
        "summed over micro-batches and processes and divided once, whatever the strategy",
    ]
    if plan.uses_batch_norm:
        lines.append(
            f"BatchNorm normalises each micro-batch of {plan.micro_batch_size:,} on its own: another "
            "micro_batch_size is another loss"
        )
    return lines


def _steps(plan: RunPlan) -> list[str]:
    used = plan.steps_per_epoch * plan.global_batch_size
    epoch = f"one epoch is {plan.steps_per_epoch:,} steps: {used:,} of {plan.num_train_samples:,} training samples"
    if plan.dropped_samples_per_epoch:
        epoch += f" (the last {plan.dropped_samples_per_epoch:,} of each epoch's shuffle are dropped)"
    samples = plan.total_steps * plan.global_batch_size
    tokens = f", {samples * plan.tokens_per_sample:,} tokens" if plan.tokens_per_sample else ""
    epochs = plan.total_steps / plan.steps_per_epoch
    lines = [epoch, f"the run is {plan.total_steps:,} steps = {epochs:.4g} epochs = {samples:,} samples{tokens}"]
    if plan.stop_after_steps < plan.total_steps:
        lines.append(f"it stops early, after step {plan.stop_after_steps:,}; the learning rate keeps to the whole run")
    every = plan.evaluate_every_steps
    when = f"every {every:,} steps and at the end" if every else "at the end"
    lines.append(f"evaluated {when} on {plan.num_eval_samples:,} samples, each counted once")
    return lines


def _learning_rate(plan: RunPlan) -> list[str]:
    schedule = plan.schedule
    k = plan.global_batch_size / plan.reference_batch_size
    formula = {"linear": f"{k:.6g}", "sqrt": f"sqrt({k:.6g})", "none": "1"}[plan.scaling]
    rule = "no scaling" if plan.scaling == "none" else f"the {plan.scaling} rule"
    lines = [
        f"peak {schedule.peak_lr:.6g} = {plan.base_lr:.6g} x {formula}, by {rule}: {plan.base_lr:.6g} was tuned at "
        f"batch {plan.reference_batch_size:,}, this is {plan.global_batch_size:,}"
    ]
    if schedule.warmup_steps:
        growth = (schedule.peak_lr - schedule.warmup_start_lr) / schedule.warmup_steps
        epochs = schedule.warmup_steps / plan.steps_per_epoch
        lines.append(
            f"warmup from {schedule.warmup_start_lr:.6g} to {schedule.peak_lr:.6g} in {schedule.warmup_steps:,} steps "
            f"({epochs:.3g} epochs), {growth:.3g} more each step"
        )
    elif plan.warmup_left_out:
        lines.append(
            f"no warmup: it would start at base_lr {plan.base_lr:.6g}, which is not below the peak "
            '(start "zero" would warm up from 0)'
        )
    else:
        lines.append("no warmup")
    lines.append(_decay(plan))
    return lines


def _decay(plan: RunPlan) -> str:
    schedule = plan.schedule
    last = f"{schedule.lr_at(plan.total_steps - 1):.3g} in the last step"
    if schedule.decay == "constant":
        return "then constant"
    if schedule.decay == "step":
        milestones = ", ".join(f"{milestone:,}" for milestone in schedule.milestones)
        return f"then x {schedule.factor:g} at steps {milestones}; {last}"
    end = f"{schedule.final_fraction:g} of the peak at the end; {last}"
    if schedule.decay == "warmup_stable_decay":
        start = plan.total_steps - schedule.decay_steps
        return f"then constant until step {start:,}, then a straight line to {end}"
    shape = "half a cosine" if schedule.decay == "cosine" else "a straight line"
    return f"then {shape} to {end}"


def _optimizer(plan: RunPlan) -> list[str]:
    decay = f"weight decay {plan.weight_decay:g}"
    if plan.no_decay and plan.weight_decay:
        decay += f", none on {', '.join(plan.no_decay)} parameters"
    clipping = "no gradient clipping" if plan.clip_norm is None else f"gradients clipped to norm {plan.clip_norm:g}"
    master = "fp32" if plan.precision == "fp32" else "bf16 autocast; weights, gradients and their reduction in fp32"
    options = ", ".join(f"{name} {value}" for name, value in plan.optimizer_options.items())
    return [f"{plan.optimizer} with {options}; {decay}", f"{clipping}; {master}; seed {plan.seed}"]
