"""Shares of a mixture: exact to less than one sample, never taken back, whatever the batch."""

from fractions import Fraction

import numpy as np
import pytest

from largebatch.batch.mixture import Mixture, whole_weights


def largest_remainders(total, weights):
    """By fractions."""
    exact = [Fraction(total * weight, sum(weights)) for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda place: (shares[place] - exact[place], place))
    for place in order[: total - sum(shares)]:
        shares[place] += 1
    return tuple(shares)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_exact_to_less_than_a_sample_up_to_10_to_the_9_steps(seed):
    random = np.random.default_rng(seed)
    weights = tuple(random.integers(1, 10**6, size=random.integers(2, 9)).tolist())
    batch = -(-sum(weights) // min(weights)) + int(random.integers(0, 1000))
    mixture = Mixture(tuple("abcdefgh"[: len(weights)]), (1,) * len(weights), weights)
    for step in (*range(50), *random.integers(50, 10**9, 300).tolist()):
        drawn = mixture.counts_after(step * batch)
        after = mixture.counts_after((step + 1) * batch)
        assert drawn == largest_remainders(step * batch, weights)
        assert all(each >= 0 for each in np.subtract(after, drawn))


def test_passes_over_each_source():
    mixture = Mixture(("a", "b", "c"), (5, 5, 10), (1, 0, 2))
    assert [mixture.counts_after(samples) for samples in (0, 3, 36)] == [(0, 0, 0), (1, 0, 2), (12, 0, 24)]
    assert mixture.epochs(36) == [2.4, 0, 2.4]


def test_ties_and_fractions():
    equal = Mixture(("a", "b", "c"), (1, 1, 1), (1, 1, 1))
    assert equal.counts_after(0) == (0, 0, 0)
    assert equal.counts_after(10) == (4, 3, 3)
    assert equal.counts_after(2) == (1, 1, 0)
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([1 / 3, 2 / 3]) == (1, 2)
    assert whole_weights([2.0, 0.0, 4.0]) == (1, 0, 2)
