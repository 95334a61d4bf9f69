"""LARS and LAMB: against other implementations and the papers' formulas.

`tests/test_strategies.py` and `tests/run/test_resume.py` hold every strategy against one process.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import nn

from largebatch.optim.lamb import Lamb
from largebatch.optim.lars import Lars
from largebatch.optim.layerwise import Layers, PartsOfLayers
from largebatch.optim.whole_layers import LayerPart
from plain_optimizers import PlainLamb

STEPS = 30
assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=0)
SHAPES = ((5, 7), (3, 2, 2), (4, 4), (6,))


def trained(make_optimizer):
    """Parameters after steps with other gradients and learning rates each time, in float64.

    The third starts at zero, and the second's first gradient is zero; the fourth, a vector, is not adapted.
    """
    rng = np.random.default_rng(0)
    parameters = [nn.Parameter(torch.tensor(rng.normal(size=shape))) for shape in SHAPES]
    with torch.no_grad():
        parameters[2].zero_()
    optimizer = make_optimizer(parameters[:3], parameters[3:])
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + step % 5)
        for number, parameter in enumerate(parameters):
            gradient = rng.normal(size=parameter.shape) * (number + 1)
            parameter.grad = torch.tensor(0 * gradient if (step, number) == (0, 1) else gradient)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def groups(adapted, others):
    return [
        {"params": adapted, "weight_decay": 0.03, "layerwise": True},
        {"params": others, "weight_decay": 0.0, "layerwise": False},
    ]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_lars_as_another_implementation(momentum, nesterov):
    options = {"trust_coefficient": 0.02, "momentum": momentum, "nesterov": nesterov}
    mine = trained(lambda *parameters: Lars(groups(*parameters), lr=0.0, **options))
    theirs = trained(
        lambda adapted, others: pytorch_optimizer.LARS([*adapted, *others], lr=0.1, weight_decay=0.03, **options)
    )
    # Where the first gradient is zero, theirs decays by eta, and we, with a ratio of 1, by 1.
    for found in (mine, theirs):
        del found[1]
    assert_close(mine, theirs)


def test_lamb_as_in_the_paper():
    options = {"betas": (0.9, 0.99), "eps": 1e-6}
    mine, theirs = (
        trained(lambda *parameters, kind=kind: kind(groups(*parameters), **options))
        for kind in (partial(Lamb, lr=0.0), PlainLamb)
    )
    assert_close(mine, theirs)


def test_parts_between_padding():
    """As in the flat vector of ZeRO: 1 element of padding, a part, 2 of padding, a part, and 2 more."""
    vector = torch.arange(12.0)
    parts = [LayerPart("a", 5, 1, 3), LayerPart("none", 0, 4, 0), LayerPart("b", 0, 6, 4)]
    layers = replace(Layers.whole([vector]), parts={vector: parts}, shapes={"a": (8,), "none": (3,), "b": (4,)})
    first, second = PartsOfLayers([vector], layers).split([vector])
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [6, 7, 8, 9])
