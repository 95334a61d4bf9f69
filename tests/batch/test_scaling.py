"""Where the scaling of moments ends; tests/plan/test_contract.py has what rules make of rates and moments."""

import re

import pytest

from largebatch.batch.scaling import scaled_moments


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
