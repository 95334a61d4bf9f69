"""What is wrong in a loop, in sentences with a remedy, by how what it does depends on the layout of a batch."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from largebatch.tools.audit.loop import ALONE, Layout
from largebatch.tools.audit.observe import Observed
from largebatch.tools.audit.outcome import Outcome, step_that_differs
from largebatch.words import counted

MAX_NAMED = 4
NO_WEIGHT = 0.01
# Of factors and weights. In bf16, gradients are not known better.
RELATIVE = 0.02

# By name: the powers of the number of processes W and of the accumulation steps A in a factor, the simplest first.
FACTORS = {
    "1": (0, 0),
    "W": (1, 0),
    "1/W": (-1, 0),
    "A": (0, 1),
    "1/A": (0, -1),
    "W·A": (1, 1),
    "1/(W·A)": (-1, -1),
    "W/A": (1, -1),
    "A/W": (-1, 1),
}
OF_STEPS = {
    "W": "every process goes through all samples: give the loader a DistributedSampler (Accelerate: prepare it)",
    "A": "the optimizer steps after each micro-batch: step, and zero_grad, only after the last of an accumulation",
    "W·A": "every process goes through all samples, and the optimizer steps after each micro-batch",
    "1/A": "too many micro-batches are accumulated: Accelerate, Trainer and DeepSpeed count them by themselves",
    "1/W": "too many micro-batches are accumulated: the number of steps is divided by the number of processes twice",
}
OF_GRADIENTS = {
    "W": "it is summed over processes, or multiplied by their number: divide by it once",
    "1/W": (
        "each process's loss is its share of the whole batch's, or comes from gathered features whose gradient stays "
        "on one process, and DDP and FSDP average over processes: multiply the loss by their number"
    ),
    "A": "micro-batches are added: divide each loss by the accumulation steps",
    "1/A": (
        "it is divided by the accumulation steps twice: Accelerate's accumulate, Trainer and DeepSpeed divide by "
        "themselves"
    ),
    "W·A": "it is summed over processes and micro-batches: divide the loss by the number of both",
    "1/(W·A)": (
        "the loss is a sum over samples, or over targets, whose share each process has, and DDP and FSDP average over "
        "processes; or it is divided by processes and micro-batches twice"
    ),
    "A/W": "losses are added over micro-batches and divided by the number of processes: divide by neither or by both",
}
# By what happens, and whether to micro-batches of one process already.
OF_OTHERS = {
    ("own", False): (
        "each process steps with a gradient of its own: the model is not wrapped in DDP, its forward pass goes around "
        "the wrapper (model.module), or no_sync covers the last micro-batch"
    ),
    ("clipped", False): (
        "gradients are clipped before they are averaged, each process's by its own norm: average first"
    ),
    ("lost", True): "only some micro-batches count: call zero_grad after a step, not in each micro-batch",
    ("lost", False): (
        "all processes train on the same part of the samples (give the loader a DistributedSampler), or the gradient "
        "of some is not averaged in"
    ),
    ("unequal", True): (
        "it is a mean over each micro-batch's targets, then over micro-batches, so targets count for more where there "
        "are few (divide sums by the number of targets of the whole batch); or something else that is not a sum is "
        "made of each micro-batch, such as a root or clipping"
    ),
    ("unequal", False): (
        "it is a mean over each process's targets, then over processes, so targets count for more where there are few: "
        "divide sums by the number of targets of the whole batch (all_reduce it before the backward pass); or "
        "something else that is not a sum is made of each process's samples"
    ),
    ("coupled", True): (
        "the loss depends on which samples share a micro-batch: BatchNorm's statistics are those of the micro-batch, "
        "and negatives are its own samples; or a term that has no samples, such as a regularizer, is added for each "
        "micro-batch; or random numbers differ"
    ),
    ("coupled", False): (
        "the loss depends on which samples share a process: BatchNorm's statistics are its own (SyncBatchNorm takes "
        "them over processes), negatives are its own samples (gather features with their gradient); or random numbers "
        "or data differ between processes"
    ),
}


def faults(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Why the optimizer gets something else than in one process, with the layouts that show it."""
    yield from _of_factor("the number of steps", {each.layout: each.num_steps for each in outcomes}, OF_STEPS)
    others: dict[str, list[Outcome]] = defaultdict(list)
    multiples: list[Outcome] = []
    for outcome in outcomes:
        if outcome.num_steps == 1:
            kind = _kind_of(outcome)
            (others[kind] if kind else multiples).append(outcome)
    for kind, found in others.items():
        first = found[0]
        said = OF_OTHERS[kind, first.layout.world_size == 1 and (kind, True) in OF_OTHERS]
        yield f"{'; '.join(str(each.layout) for each in found)}: {shown(first)}; {said}"
    yield from _of_gradients(multiples)


def faults_of_first_steps(observed: Mapping[Layout, Sequence[Observed]]) -> Iterator[str]:
    """What goes wrong in the first steps of each layout, on any process, beside those of one process."""
    for layout, by_rank in observed.items():
        # `faults` has the first one.
        if step := step_that_differs(by_rank, "unclipped"):
            yield f"{layout}, step {step + 1}: {OF_OTHERS['own', False]}"
    for group in range(len(observed[ALONE][0].steps[0].rates)):
        rates = {
            layout: [[step.rates[group] for step in each.steps] for each in by_rank]
            for layout, by_rank in observed.items()
        }
        yield from _of_rates(rates, rates[ALONE][0])


def _of_rates(rates: Mapping[Layout, Sequence[Sequence[float]]], expected: Sequence[float]) -> Iterator[str]:
    """What is wrong with the learning rate of the first steps, which each process has in each layout."""
    by_layout = {
        layout: next((each for each in found if not _agree(each, expected)), found[0])
        for layout, found in rates.items()
    }
    wrong = {layout: found for layout, found in by_layout.items() if not _agree(found, expected)}
    if not wrong:
        return
    others = "; ".join(f"{layout}: {_numbers(found)}" for layout, found in wrong.items())
    said = f"the learning rate of the first steps is {_numbers(expected)} in one process, and {others}"
    cause = "its schedule depends on processes or micro-batches, as by len(loader): count the optimizer's steps"
    if expected[0] and _name_of({layout: found[0] / expected[0] for layout, found in by_layout.items()}) == "W":
        cause = (
            "it is multiplied by the number of processes for the same effective batch, whose gradient is a mean "
            "already; scale it by the effective batch (Goyal et al. 2017, section 2.1)"
        )
    for attribute, unit in (("world_size", "process"), ("accumulation", "micro-batch")):
        if all(_agree(found, expected[:: getattr(layout, attribute)]) for layout, found in wrong.items()):
            cause = f"the schedule moves once per {unit} instead of once per step"
    yield f"{said}: {cause}"


def _kind_of(outcome: Outcome) -> str | None:
    """The key of `OF_OTHERS` for a gradient that is no multiple of that of one process."""
    if step_that_differs(outcome.by_rank, "unclipped") is not None:
        return "clipped" if step_that_differs(outcome.by_rank, "gradients") is None else "own"
    if None not in outcome.factors.values():
        return None
    if outcome.weights is None:
        return "coupled"
    return "lost" if np.any(np.abs(outcome.weights) < NO_WEIGHT) else "unequal"


def shown(outcome: Outcome) -> str:
    """The gradient of an outcome, beside that of one process."""
    if outcome.num_steps != 1:
        return f"{counted(outcome.num_steps, 'step')} instead of one"
    factors = outcome.factors
    others = [name for name, factor in factors.items() if factor is None]
    if not others:
        times = _span(factors.values())
        return "the same" if times == "1" else f"{times} times"
    weights = outcome.weights
    if weights is None:
        return "another gradient" + (f" of {_some(others)}" if len(others) < len(factors) else "")
    lost = [str(sample) for sample in np.flatnonzero(np.abs(weights) < NO_WEIGHT)]
    return f"without samples {_some(lost)} of {len(weights)}" if lost else f"samples count {_span(weights)} times"


def _of_gradients(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What multiplies the gradient of all parameters, or of some."""
    parameters = outcomes[0].factors if outcomes else {}
    names: dict[str, list[str]] = defaultdict(list)
    for parameter in parameters:
        names[_name_of({each.layout: each.factors[parameter] or 0 for each in outcomes})].append(parameter)
    for wrong in names.values():
        whose = "the gradient" if len(names) == 1 else f"the gradient of {_some(wrong)} alone"
        yield from _of_factor(whose, {each.layout: each.factors[wrong[0]] or 0 for each in outcomes}, OF_GRADIENTS)


def _of_factor(what: str, factors: Mapping[Layout, float], causes: Mapping[str, str]) -> Iterator[str]:
    name = _name_of(factors)
    if name != "1":
        values = "; ".join(f"{layout}: {factor:.4g}" for layout, factor in factors.items())
        times = f"{name} times" if name else "not"
        yield f"{what} is {times} that of one process ({values}): {causes.get(name, 'no cause is known for that')}"


def _name_of(factors: Mapping[Layout, float]) -> str:
    """The name of what all factors are in their layouts; "" if they have none in common."""
    for name, (w, a) in FACTORS.items():
        named = [each.world_size**w * each.accumulation**a for each in factors]
        if np.allclose(list(factors.values()), named, rtol=RELATIVE, atol=0):
            return name
    return ""


def _agree(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether rates are the same for as many steps as both have: another number of steps is another fault."""
    both = min(len(found), len(expected))
    return np.allclose(found[:both], expected[:both], rtol=1e-6, atol=0)


def _span(values: Any) -> str:
    return " to ".join(dict.fromkeys(f"{end:.4g}" for end in (min(values), max(values))))


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{each:.4g}" for each in values)


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} others" if more > 0 else "")
