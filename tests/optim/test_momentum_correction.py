"""Goyal et al. 2017, remark 2: where the learning rate is folded into the velocity, a change of it needs a correction.

Their equations 9 and 10, each written by hand, in float64; torch's SGD, which recipes get, is the first form.
"""

import numpy as np
import torch
from torch import nn

from largebatch.config import load_config
from largebatch.optim import build_optimizer
from largebatch.plan import resolve
from paths import DIGITS

MOMENTUM = 0.9
RATES = [0.1] * 5 + [0.3] * 5 + [0.03] * 5
GRADIENTS = np.random.default_rng(0).normal(size=(len(RATES), 4))


def outside_of_the_velocity() -> np.ndarray:
    """u = m u + g; w = w - eta u (equation 9)."""
    weight = np.ones(4)
    velocity = np.zeros(4)
    for rate, gradient in zip(RATES, GRADIENTS, strict=True):
        velocity = MOMENTUM * velocity + gradient
        weight = weight - rate * velocity
    return weight


def inside_of_the_velocity(is_corrected: bool) -> np.ndarray:
    """v = m v + eta g; w = w - v (equation 10), with m multiplied by the ratio of the rates where it is corrected."""
    weight = np.ones(4)
    velocity = np.zeros(4)
    for before, rate, gradient in zip([RATES[0], *RATES[:-1]], RATES, GRADIENTS, strict=True):
        correction = rate / before if is_corrected else 1.0
        velocity = MOMENTUM * correction * velocity + rate * gradient
        weight = weight - velocity
    return weight


def torch_sgd() -> np.ndarray:
    words = ["--optimizer.weight_decay=0", "--optimizer.nesterov=false", f"--optimizer.momentum={MOMENTUM}"]
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(model, resolve(load_config(DIGITS, words), world_size=1))
    for rate, gradient in zip(RATES, GRADIENTS, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.weight.grad = torch.tensor(gradient).unsqueeze(0)
        optimizer.step()
    return model.weight.detach().numpy()[0]


def test_a_changing_rate_needs_the_correction_inside_only():
    expected = outside_of_the_velocity()
    np.testing.assert_allclose(torch_sgd(), expected)
    np.testing.assert_allclose(inside_of_the_velocity(is_corrected=True), expected)
    assert np.abs(inside_of_the_velocity(is_corrected=False) - expected).max() > 0.1
