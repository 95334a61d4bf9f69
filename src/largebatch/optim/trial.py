"""Trial steps of a plan's optimizer on small tensors: before anything is trained, it must do what the plan says of it.

Each step starts from the same weights, so that twice the rate moves weights twice as far: with coupled or decoupled
weight decay, with trust ratios of any size, and with signs.
"""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.config.optimizers import OptimizerEntry, ParameterRole
from largebatch.errors import ConfigError, UserError, reason_of
from largebatch.optim.build import optimizer_over
from largebatch.optim.states import split_state
from largebatch.plan import RunPlan

RATE = 2e-3
DECAY = 0.1
# By how much twice the rate may miss twice the step: enough for powers of the rate near 1, such as MADGRAD's 2/3.
TOLERANCE = 0.25
# Some optimizers use their first steps only to collect gradients.
STEPS = 12
SIZE = 12
WEIGHTS = torch.linspace(-2.0, 2.0, SIZE, dtype=torch.float32).view(4, 3)
GRADIENT = torch.linspace(1.0, -0.5, SIZE, dtype=torch.float32).view(4, 3)


def try_optimizer(plan: RunPlan) -> None:
    """Build the plan's optimizer and step it on small fp32 tensors on the CPU, which takes milliseconds.

    Raises:
        UserError: It cannot be built, its step fails, its states are not those that its entry declares or not all that
            a resumed run needs, or it does not follow the learning rate and weight decay of its parameter groups.
    """
    entry = plan.optimizer_entry
    assert entry is not None
    try:
        problem = next(_problems(plan, entry), None)
    except UserError:
        raise
    # A task's author may have written it, so it may raise anything.
    except Exception as error:
        problem = f'fails in a step of a matrix or, if it `needs` only "elements", of flat pieces: {reason_of(error)}'
    if problem:
        raise ConfigError(f'optimizer: "{entry.name}" ({entry.constructor}) {problem}; correct its `step`')


def _problems(plan: RunPlan, entry: OptimizerEntry) -> Iterator[str]:
    """What the optimizer does wrong, as phrases that complete "the optimizer …"."""
    trained = _build(plan, entry)
    moves = _moves(trained)
    for group in trained.param_groups:
        gradients = zip(group["params"], _with_pieces(GRADIENT), strict=False)
        is_changed = not all(torch.equal(parameter.grad, given) for parameter, given in gradients)
        # torch's own does so, too: SGD with Nesterov's momentum, of a list of tensors.
        if is_changed and not entry.constructor.startswith("torch."):
            yield "changes gradients in its step, which DeepSpeed uses after it; change a copy"
        for parameter in group["params"]:
            # Not empty, so that a state that is missing is an error.
            state = trained.state[parameter] or {"": None}
            split_state(state, parameter, f"a parameter of shape {tuple(parameter.shape)}", plan, group)
    resumed = _build(plan, entry)
    for parameter, copy in zip(_parameters(trained), _parameters(resumed), strict=True):
        resumed.state[copy] = deepcopy(trained.state[parameter])
    if not torch.equal(_moves(trained, -GRADIENT), _moves(resumed, -GRADIENT)):
        yield "has state outside of `optimizer.state`, which a resumed run would not have"
    trained.state.clear()
    for group in trained.param_groups:
        group["lr"] = 2 * RATE
    expected = 2 * moves
    errors = (_moves(trained) - expected).norm(dim=1)
    if not (errors < TOLERANCE * expected.norm(dim=1)).all():
        yield "does not follow the learning rate of its groups: twice the rate does not make steps twice as long"
    decayed, exempt = _moves(_build(plan, entry), torch.zeros_like(GRADIENT))
    if exempt.any():
        yield "moves weights, or makes them NaN, with a gradient of 0 in a group whose weight_decay is 0"
    if plan.optimizer.weight_decay and not (decayed[:SIZE] * WEIGHTS.flatten()).sum() < 0:
        yield f"ignores the weight_decay {DECAY:g} of a group: with a gradient of 0, its weights do not move toward 0"
    if entry.needs == "elements" and not torch.allclose(moves[:, :SIZE], moves[:, SIZE:], rtol=1e-2):
        yield "depends on how strategies divide a tensor; see LayerwiseOptimizer, and `needs` of an OptimizerEntry"


def _build(plan: RunPlan, entry: OptimizerEntry) -> Optimizer:
    """A new optimizer over two groups, the first with weight decay, if the plan has any, and the second without.

    A group has a matrix and, if the optimizer needs only elements, the matrix again as flat pieces.
    """
    weights = _with_pieces(WEIGHTS) if entry.needs == "elements" else (WEIGHTS,)
    groups = []
    for decays in (True, False):
        options = entry.group_of(ParameterRole(None, tuple(WEIGHTS.shape), decays))
        weight_decay = DECAY if decays and plan.optimizer.weight_decay else 0.0
        parameters = [nn.Parameter(each.clone()) for each in weights]
        groups.append({"params": parameters, "weight_decay": weight_decay, **options})
    optimizer = optimizer_over(groups, plan)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    return optimizer


def _with_pieces(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A matrix, and uneven flat pieces of it."""
    return matrix, *matrix.flatten().tensor_split([3])


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moves(optimizer: Optimizer, gradient: torch.Tensor = GRADIENT) -> torch.Tensor:
    """How far steps with this gradient move the weights, in all: a row per group, whose pieces follow the matrix."""
    total = torch.tensor(0.0)
    for _ in range(STEPS):
        for group in optimizer.param_groups:
            # No pieces if the group has none.
            pairs = zip(_with_pieces(WEIGHTS), _with_pieces(gradient), strict=True)
            for parameter, (weights, part) in zip(group["params"], pairs, strict=False):
                parameter.data.copy_(weights)
                parameter.grad = part.clone()
        before = _weights(optimizer)
        optimizer.step()
        total = total + (_weights(optimizer) - before)
    return total


def _weights(optimizer: Optimizer) -> torch.Tensor:
    rows = [torch.cat([parameter.data.flatten() for parameter in group["params"]]) for group in optimizer.param_groups]
    return torch.stack(rows)
