"""What is wrong in a loop, in sentences with a remedy, by how what it does depends on the layout of a batch."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from typing import Any

import numpy as np

from largebatch.tools.audit.observe import RATES, Observed
from largebatch.tools.audit.outcome import ALONE, Layout, Outcome, step_that_differs
from largebatch.words import some

# How far a factor may be from the one that it is taken for. In bf16, gradients are not known better.
RELATIVE = 0.02

OF_STEPS = {
    "W": (
        "every process goes through all samples, or a step takes a part of a batch (Accelerate's split_batches): give "
        "the loader a DistributedSampler (Accelerate: prepare it), and each process whole micro-batches"
    ),
    "A": "the optimizer steps after each micro-batch: step, and zero_grad, only after the last of an accumulation",
    "W·A": "every process goes through all samples, and the optimizer steps after each micro-batch",
    # In part of the layouts, such as none instead of one.
    "": (
        "micro-batches are counted wrong: if there are more steps, from 0 instead of 1; if fewer, twice (Accelerate, "
        "Trainer and DeepSpeed count them by themselves; each process counts its own), or not all processes step"
    ),
}
# Each remedy multiplies by what is missing, whether the loss is a mean or a sum, and whoever divides already.
OF_GRADIENTS = {
    "W": "it is summed over processes, or multiplied by their number: divide the loss by W",
    "1/W": (
        "each process's loss is its share of the whole batch's, and DDP and FSDP average over processes: multiply the "
        "loss by W; or it comes from gathered features whose gradient stays on one process: gather them with their "
        "gradient"
    ),
    "A": "micro-batches are added: divide each loss by the accumulation steps",
    "1/A": (
        "it is divided by the accumulation steps once too often: a sum over samples is not divided, and Accelerate's "
        "accumulate, Trainer and DeepSpeed divide by themselves"
    ),
    "W·A": "it is summed over processes and micro-batches: divide the loss by W·A",
    "1/(W·A)": (
        "the loss is a sum over samples, or over targets, but divided by the accumulation steps, as Accelerate's "
        "accumulate and DeepSpeed do, and averaged over processes, as DDP and FSDP do; or a mean is divided by both "
        "once too often: multiply the loss by W·A"
    ),
    "A/W": (
        "losses are added over micro-batches and divided by the number of processes, over which DDP and FSDP average "
        "already: divide by the accumulation steps instead"
    ),
    "1/√W": (
        "it is clipped by a norm that is added up over processes, each of which has the whole gradient: take the norm "
        "of one process"
    ),
}
# By `Outcome.kind`. What each process does differently, it does in its micro-batches.
OF_KINDS = {
    "not finite": (
        "a micro-batch without targets is divided by their number: divide its sum by that of the whole batch's targets"
    ),
    "update": (
        "the optimizer makes another update of the same gradient: its rate, the norm by which it is clipped (a shard's "
        "own, or too large by the root of the replicas), or its own arithmetic depends on the number of processes or "
        "micro-batches"
    ),
    "own": (
        "each process steps with a gradient of its own: the model is not wrapped in DDP, or is not sharded as a whole, "
        "its forward pass goes around the wrapper (model.module), no_sync covers the last micro-batch, or all_reduce "
        "leaves some gradients out"
    ),
    "clipped": "gradients are clipped before they are averaged, each process's by its own norm: average first",
    "start": (
        "weights differ from those of one process before the first step: set the same seed in each process before the "
        "model is made, or broadcast the weights (DDP does); draw them before they are sharded; or start without a "
        "checkpoint, which an earlier training may have written"
    ),
    "lost": (
        "processes train on the same samples instead of on a part each (give the loader a DistributedSampler, and draw "
        "no order in each process), or the gradient of some is not averaged in"
    ),
    "often": "gradients are clipped after each micro-batch: clip their sum once, before the optimizer's step",
    "unequal": (
        "it is a mean over each micro-batch's targets, then over all of them, so targets count for more where there "
        "are few: divide sums by the number (or the weights) of the whole batch's targets per process (all_reduce it "
        "before the backward pass, and divide by W; by W·A if Accelerate or DeepSpeed divide by the accumulation "
        "steps); or something else that is not a sum is made of each micro-batch's samples, such as a root or "
        "clipping, or some are reduced more often"
    ),
    "coupled": (
        "the loss depends on which samples share a micro-batch: {}negatives are its own (gather those of processes "
        "with their gradient; accumulation divides them always); or a term that has no samples, such as a "
        "regularizer, is added for each; or a buffer that changes in each forward pass is used by the next one; or "
        "each process or micro-batch clips its part of the gradient by that part's norm; or random numbers or data "
        "differ between them, or one computes a part of the loss that others do not"
    ),
}
OF_STATISTICS = "BatchNorm's statistics are its own (SyncBatchNorm takes them over processes only), or "
OF_SCHEDULES = "its schedule depends on processes or micro-batches, as by len(loader): count the optimizer's steps"
LOST_MICRO_BATCHES = (
    "only some micro-batches count: step after the last of them (counted from 1, not from 0), and call zero_grad after "
    "a step, not in each micro-batch"
)


def faults(outcomes: Mapping[Layout, Outcome]) -> Iterator[str]:
    """Why the optimizer gets something else than in one process, with the layouts that show it."""
    steps = {layout: outcome.num_steps for layout, outcome in outcomes.items()}
    yield from _of_factors("the number of steps", steps, OF_STEPS)
    by_kind: dict[str, list[Layout]] = defaultdict(list)
    for layout, outcome in outcomes.items():
        by_kind[outcome.kind].append(layout)
    for kind, layouts in by_kind.items():
        if kind in OF_KINDS:
            is_of_one_process = kind == "lost" and layouts[0].world_size == 1
            cause = LOST_MICRO_BATCHES if is_of_one_process else OF_KINDS[kind]
            cause = cause.format(OF_STATISTICS if outcomes[layouts[0]].by_rank[0].has_batch_norm else "")
            said, *others = dict.fromkeys(outcomes[layout].said for layout in layouts)
            where = f" in {layouts[0]}" if others else ""
            yield f"{'; '.join(map(str, layouts))}: {said}{where}; {cause}"
    multiples = {layout: each.factors for layout, each in outcomes.items() if each.kind in ("same", "multiple")}
    # What multiplies the gradients of all parameters, or of some.
    together: dict[str, dict[str, Mapping[Layout, float]]] = defaultdict(dict)
    for parameter in next(iter(multiples.values()), ()):
        factors = {layout: each[parameter] for layout, each in multiples.items()}
        together[_name_of(factors)][parameter] = factors
    for alike in together.values():
        whose = "the gradient" if len(together) == 1 else f"the gradient of {some([*alike])} alone"
        yield from _of_factors(whose, next(iter(alike.values())), OF_GRADIENTS)


def _of_factors(what: str, factors: Mapping[Layout, float], causes: Mapping[str, str]) -> Iterator[str]:
    name = _name_of(factors)
    if name != "1":
        values = "; ".join(f"{layout}: {factor:.4g}" for layout, factor in factors.items())
        times = f"{name} times" if name else "not"
        yield f"{what} is {times} that of one process ({values}): {causes.get(name, 'no cause is known for that')}"


def _name_of(factors: Mapping[Layout, float]) -> str:
    """The name in `Layout.factors` of what all factors are, each in its layout; "" if there is none."""
    for name in ALONE.factors:
        if all(isclose(factor, layout.factors[name], rel_tol=RELATIVE) for layout, factor in factors.items()):
            return name
    return ""


def faults_of_first_steps(observed: Mapping[Layout, Sequence[Observed]]) -> Iterator[str]:
    """What goes wrong in the first steps of each layout, on any process, beside those of one process."""
    wrong: dict[tuple[str, Any], dict[Layout, Any]] = defaultdict(dict)
    for layout, by_rank in observed.items():
        # `faults` has the first one.
        if (step := step_that_differs(each.unclipped for each in by_rank)) > 1:
            yield f"{layout}, step {step}: {OF_KINDS['own']}"
        for process in by_rank:
            # Without a step, it has no groups.
            for group, expected in zip(process.groups, observed[ALONE][0].groups, strict=False):
                for name, value in expected.items():
                    found = group.get(name, value)
                    # Of as many steps as both have: another number of steps is another fault.
                    if not all(map(isclose, np.atleast_1d(found), np.atleast_1d(value))):
                        wrong[name, value][layout] = found
    for (name, value), others in wrong.items():
        if name == RATES:
            yield _of_rates(value, others)
        else:
            found = "; ".join(f"{layout}: {other}" for layout, other in others.items())
            yield f"the optimizer has {name} {value} in one process ({found}): let it depend on the batch alone"


def _of_rates(expected: Sequence[float], wrong: Mapping[Layout, Sequence[float]]) -> str:
    """What is wrong with the learning rates of the first steps."""
    causes = _rates_by_cause(expected, ALONE)
    for layout, rates in wrong.items():
        for cause, predicted in _rates_by_cause(expected, layout).items():
            # If steps are missing or added, the rates follow from that.
            fits = len(rates) == len(expected) and predicted and all(map(isclose, rates, predicted))
            if not fits:
                causes.pop(cause, None)
    cause = next(iter(causes), OF_SCHEDULES)
    others = "; ".join(f"{layout}: {_numbers(rates)}" for layout, rates in wrong.items())
    return f"the learning rate of the first steps is {_numbers(expected)} in one process, and {others}: {cause}"


def _rates_by_cause(expected: Sequence[float], layout: Layout) -> dict[str, Sequence[float]]:
    """The learning rates of the first steps in a layout, given those of one process, by cause, the simplest first."""
    return {
        "the schedule moves once per process instead of once per step": expected[:: layout.world_size],
        "the schedule moves once per micro-batch instead of once per step": expected[:: layout.accumulation],
        "the schedule moves once per micro-batch, also before the first step": (
            expected[layout.accumulation - 1 :: layout.accumulation]
        ),
        **{
            f"it is {name} times that of one process for the same effective batch; scale it by the effective batch "
            "(Goyal et al. 2017, section 2.1)": [factor * rate for rate in expected]
            for name, factor in layout.factors.items()
        },
    }


def _numbers(rates: Sequence[float]) -> str:
    return ", ".join(f"{each:.4g}" for each in rates)
