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

# So small that steps add up as if weights stayed where they are: then twice the rate moves them twice as far, up to
# this tolerance, even if weight decay follows the step, or is an exponential.
RATE, TOLERANCE = 1e-4, 0.1
DECAY = 0.1
# Some optimizers use their first step only to set up their states.
STEPS = 3
SHAPE = (4, 3)


def try_optimizer(plan: RunPlan) -> None:
    """Build the plan's optimizer and step it on small tensors on the CPU, in fp64, which takes milliseconds.

    Raises:
        UserError: It cannot be built, its step fails, its states are not those that its entry declares or not all that
            a resumed run needs, or it does not follow the learning rate and weight decay of its parameter groups.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        problem = next(_problems(plan), None)
    except UserError:
        raise
    # A task's author may have written it, so it may raise anything.
    except Exception as error:
        problem = f"fails in a step: {reason_of(error)}"
    finally:
        torch.set_default_dtype(before)
    if problem:
        entry = plan.optimizer_entry
        assert entry is not None
        raise ConfigError(f'optimizer: "{entry.name}" ({entry.constructor}) {problem}; correct its `step`')


class _Trial:
    """A new optimizer over two parameters, the first with weight decay, if the plan has any, and the second without."""

    def __init__(self, plan: RunPlan, rate: float):
        signs = torch.tensor([1.0, -1.0, 1.0])
        self.parameters = [nn.Parameter(torch.linspace(0.5, 2.0, 12).view(SHAPE) * signs) for _ in range(2)]
        self.decay = DECAY if plan.optimizer.weight_decay else 0.0
        groups = [
            {"params": [parameter], "weight_decay": decay, "layerwise": layerwise}
            for parameter, decay, layerwise in zip(self.parameters, (self.decay, 0.0), (True, False), strict=True)
        ]
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer: Optimizer = optimizer_over(groups, plan)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, gradient: torch.Tensor) -> None:
        """Take a step in which every parameter has this gradient."""
        for parameter in self.parameters:
            parameter.grad = gradient.clone()
        self.optimizer.step()

    def moved(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """How far some steps move each parameter."""
        for _ in range(STEPS):
            self.step(gradient)
        return [parameter.detach() - start for parameter, start in zip(self.parameters, self.start, strict=True)]


def _problems(plan: RunPlan) -> Iterator[str]:
    """What the optimizer does wrong, as predicates of it."""
    zero, gradient = torch.zeros(SHAPE), torch.linspace(1.0, -0.5, 12).view(SHAPE)
    trial = _Trial(plan, RATE)
    trial.step(gradient)
    for parameter in trial.parameters:
        split_state(trial.optimizer.state[parameter], parameter, f"a parameter of shape {SHAPE}", plan)
    if any(moved.any() for moved in _Trial(plan, 0.0).moved(gradient)):
        yield "moves weights, or makes them NaN, at a learning rate of 0 in its groups"
    once, twice = (_Trial(plan, rate).moved(gradient) for rate in (RATE, 2 * RATE))
    for moved, further in zip(once, twice, strict=True):
        if not moved.any():
            yield "ignores the learning rate of its groups: at a rate above 0, weights do not move"
        elif not (further - 2 * moved).norm() <= TOLERANCE * (2 * moved).norm():
            ratio = float(further.norm() / moved.norm())
            yield f"does not follow the learning rate of its groups: twice the rate makes {ratio:.3g} times the step"
    trial = _Trial(plan, RATE)
    decayed, exempt = trial.moved(zero)
    if exempt.any():
        yield "moves weights, or makes them NaN, with a gradient of 0 in a group whose weight_decay is 0"
    if trial.decay and not (decayed * trial.start[0] < 0).all():
        yield f"ignores the weight_decay {DECAY:g} of a group: with a gradient of 0, its weights do not move toward 0"
    trial, resumed = _Trial(plan, RATE), _Trial(plan, RATE)
    trial.moved(gradient)
    for parameter, copy in zip(trial.parameters, resumed.parameters, strict=True):
        copy.data.copy_(parameter.data)
        resumed.optimizer.state[copy] = deepcopy(trial.optimizer.state[parameter])
    for each in (trial, resumed):
        each.step(gradient.flip(0))
    if not all(map(torch.equal, trial.parameters, resumed.parameters)):
        yield "has state outside of `optimizer.state`, which a resumed run would not have"
