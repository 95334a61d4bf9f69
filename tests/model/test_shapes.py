"""Models of shapes alone, also of those that look at numbers while they are built."""

import pytest
import torch
from torch import nn

from largebatch.model.building import build_shapes


class DrawsPaths(nn.Linear):
    """As models with stochastic depth: a number of each layer, by way of a tensor."""

    def __init__(self):
        super().__init__(2, 3)
        self.rates = torch.linspace(0, 0.5, 3).tolist()


def test_a_model_that_looks_at_numbers():
    model = build_shapes(DrawsPaths)
    assert model.rates == [0.0, 0.25, 0.5]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_models_own_error_is_raised():
    def build():
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        build_shapes(build)
