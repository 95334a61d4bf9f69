"""Scaling rules against the papers' numbers."""

import math
import re

import pytest

from largebatch.batch.scaling import scaled_moments, scaling_factor


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


def test_moments_of_the_square_root_rule():
    """By hand from arXiv 2205.10287: 1 - 4 x 0.1, 1 - 4 x 0.001, 1e-8 / 2."""
    betas, eps = scaled_moments("sde", 4, (0.9, 0.999), 1e-8)
    assert betas == pytest.approx((0.6, 0.996), rel=1e-14)
    assert eps == pytest.approx(5e-9, rel=1e-14)


@pytest.mark.parametrize("batch", [8, 64, 512, 2048])
def test_half_life_in_samples_is_kept(batch):
    """0.95 at batch 512 forgets half in log(1/2) / log(0.95) = 13.51 steps, 6,919 samples."""
    betas, eps = scaled_moments("half_life", batch / 512, (0.8, 0.95), 1e-8)
    assert (betas[0], eps) == (0.8, 1e-8)
    assert math.log(0.5) / math.log(betas[1]) * batch == pytest.approx(6918.8, abs=0.1)


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
