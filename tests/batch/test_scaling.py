"""Scaling rules, and where that of moments ends; tests/plan/test_contract.py has what it makes of them."""

import re

import pytest

from largebatch.batch.scaling import scaled_moments, scaling_factor


@pytest.mark.parametrize(("rule", "factor"), [("linear", 32), ("sqrt", 32**0.5), ("none", 1)])
def test_factor(rule, factor):
    """Goyal et al. 2017, section 5.1: 0.1 x 32 = 3.2."""
    assert scaling_factor(rule, 8192, 256) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize(
    ("rule", "k", "betas", "words"),
    [
        ("sde", 10, (0.9, 0.999), "the beta 0.9 would become 1 - 10 x (1 - 0.9), which is not above 0"),
        ("sde", 12, (0.95, 0.9), "the beta 0.9 would"),
        ("half_life", 9, (0.9, 0.95), "0.95 ** 9 = 0.6302, too small for the first, 0.9"),
        ("half_life", 1e9, (0.0, 0.95), "= 0, too small"),
        ("half_life", 2, (0.0, 0.0), "too small for the first"),
    ],
)
def test_moments_outside_the_range_of_their_rule(rule, k, betas, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        scaled_moments(rule, k, betas, 1e-8)
