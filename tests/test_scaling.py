"""Scaling rules against the papers' numbers."""

import pytest

from largebatch.scaling import scaling_factor


@pytest.mark.parametrize(
    ("rule", "batch", "reference", "factor"),
    [
        ("linear", 8192, 256, 32.0),  # Goyal et al. 2017, section 5.1: 0.1 x 32 = 3.2
        ("linear", 128, 256, 0.5),
        ("sqrt", 8192, 256, 5.656854249492381),
        ("sqrt", 1024, 512, 1.4142135623730951),
        ("none", 8192, 256, 1.0),
    ],
)
def test_factor(rule, batch, reference, factor):
    assert scaling_factor(rule, batch, reference) == pytest.approx(factor, rel=1e-15)
