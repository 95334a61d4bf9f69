"""Trial steps of a plan's optimizer on small tensors: before anything is trained, it must do what the plan says of it.

What is tried holds for every optimizer: with coupled or decoupled weight decay, with trust ratios, and of signs.
"""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.backend.state import split_state
from largebatch.errors import ConfigError, UserError, reason_of
from largebatch.optim.build import optimizer_over
from largebatch.plan import RunPlan

# The learning rate, and the largest part of a tensor's norm by which a step moves it: so small that steps add up almost
# as if weights stayed where they are. Then twice the rate moves them twice as far, up to this tolerance. It allows for
# powers of the rate near 1, such as MADGRAD's 2/3.
RATE, MOVE, TOLERANCE = 2e-3, 1e-3, 0.25
DECAY = 0.1
# Some optimizers use their first steps only to collect gradients.
STEPS = 12
START = torch.linspace(-2.0, 2.0, 12, dtype=torch.float32).view(4, 3)
GRADIENT = torch.linspace(1.0, -0.5, 12, dtype=torch.float32).view(4, 3)


def try_optimizer(plan: RunPlan) -> None:
    """Build the plan's optimizer and step it on small fp32 tensors on the CPU, which takes milliseconds.

    Raises:
        UserError: It cannot be built, its step fails, its states are not those that its entry declares or not all that
            a resumed run needs, or it does not follow the learning rate and weight decay of its parameter groups.
    """
    entry = plan.optimizer_entry
    assert entry is not None
    try:
        _check_states(plan)
        problem = next(_problems(plan, entry.needs == "elements"), None)
    except UserError:
        raise
    # A task's author may have written it, so it may raise anything.
    except Exception as error:
        problem = f"fails in a step: {reason_of(error)}"
    if problem:
        raise ConfigError(f'optimizer: "{entry.name}" ({entry.constructor}) {problem}; correct its `step`')


def _built(plan: RunPlan, *rates: float, start: torch.Tensor = START) -> Optimizer:
    """A new optimizer over two parameters, the first with weight decay, if the plan has any, and the second without.

    The learning rates are those of the two, or one for both.
    """
    groups = [
        {"params": [nn.Parameter(start.clone())], "weight_decay": decay, "layerwise": layerwise}
        for decay, layerwise in ((DECAY if plan.optimizer.weight_decay else 0.0, True), (0.0, False))
    ]
    optimizer = optimizer_over(groups, plan)
    for group, rate in zip(optimizer.param_groups, rates * (2 // len(rates)), strict=True):
        group["lr"] = rate
    return optimizer


def _step(optimizer: Optimizer, gradient: torch.Tensor, steps: int = STEPS) -> list[torch.Tensor]:
    """Take steps with this gradient of both parameters, and return how far these move them."""
    parameters = [group["params"][0] for group in optimizer.param_groups]
    before = [parameter.detach().clone() for parameter in parameters]
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)]


def _rates_of_small_steps(plan: RunPlan) -> list[float]:
    """The learning rates with which no step moves the two parameters far, as one with a large trust ratio would."""
    for steps in range(1, STEPS + 1):
        moves = [float(moved.norm() / START.norm()) for moved in _step(_built(plan, RATE), GRADIENT, steps)]
        if all(moves):
            return [RATE * min(1.0, MOVE / move) for move in moves]
    return [RATE, RATE]


def _check_states(plan: RunPlan) -> None:
    """Refuse states, after a step, that are not those that the entry declares."""
    optimizer = _built(plan, RATE)
    _step(optimizer, GRADIENT, 1)
    for group in optimizer.param_groups:
        [parameter] = group["params"]
        # Not empty, so that a state that is missing is an error.
        state = optimizer.state[parameter] or {"": None}
        split_state(state, parameter, f"a parameter of shape {tuple(START.shape)}", plan)


def _problems(plan: RunPlan, is_elementwise: bool) -> Iterator[str]:
    """What the optimizer does wrong, as predicates of it; `is_elementwise` says that it needs single elements alone."""
    if any(moved.any() for moved in _step(_built(plan, 0.0), GRADIENT)):
        yield "moves weights, or makes them NaN, at a learning rate of 0 in its groups"
    rates = _rates_of_small_steps(plan)
    once, twice = (_step(_built(plan, *(times * rate for rate in rates)), GRADIENT) for times in (1, 2))
    for moved, further in zip(once, twice, strict=True):
        if not moved.any():
            yield "ignores the learning rate of its groups: at a rate above 0, weights do not move"
        elif not (further - 2 * moved).norm() <= TOLERANCE * (2 * moved).norm():
            ratio = float(further.norm() / moved.norm())
            yield f"does not follow the learning rate of its groups: twice the rate makes {ratio:.2g} times the step"
    decayed, exempt = _step(_built(plan, RATE), torch.zeros_like(START))
    if exempt.any():
        yield "moves weights, or makes them NaN, with a gradient of 0 in a group whose weight_decay is 0"
    if plan.optimizer.weight_decay and not (decayed * START).sum() < 0:
        yield f"ignores the weight_decay {DECAY:g} of a group: with a gradient of 0, its weights do not move toward 0"
    trained, resumed = _built(plan, *rates), _built(plan, *rates)
    _step(trained, GRADIENT)
    for group, other in zip(trained.param_groups, resumed.param_groups, strict=True):
        [parameter], [copy] = group["params"], other["params"]
        copy.data.copy_(parameter.data)
        resumed.state[copy] = deepcopy(trained.state[parameter])
    if not all(map(torch.equal, *(_step(each, GRADIENT.flip(0), 1) for each in (trained, resumed)))):
        yield "has state outside of `optimizer.state`, which a resumed run would not have"
    for group in resumed.param_groups:
        group["lr"] *= 2
    if any(map(torch.equal, *(_step(each, GRADIENT) for each in (trained, resumed)))):
        yield "keeps its first learning rate above 0: steps stay the same when that of its groups changes"
    if is_elementwise and not _steps_pieces_alike(plan, rates, once):
        yield "depends on how strategies divide a tensor; see LayerwiseOptimizer, and `needs` of an OptimizerEntry"


def _steps_pieces_alike(plan: RunPlan, rates: list[float], whole: list[torch.Tensor]) -> bool:
    """Whether the two parameters, divided into uneven flat pieces, move as they did whole, up to rounding."""
    pieces = zip(*(each.flatten().tensor_split([3]) for each in (START, GRADIENT)), strict=True)
    divided = [_step(_built(plan, *rates, start=start), gradient) for start, gradient in pieces]
    return all(
        (torch.cat(parts) - moved.flatten()).norm() <= 1e-2 * moved.norm()
        for moved, *parts in zip(whole, *divided, strict=True)
    )
