"""Shares of a mixture: exact to less than one sample, never taken back, whatever the batch."""

from fractions import Fraction

import numpy as np
import pytest

from largebatch.batch.mixture import Mixture, MixturePhase, apportion, whole_weights


def largest_remainders(total, weights):
    """By numpy, in another order of operations."""
    products = total * weights.astype(object)
    shares = products // int(weights.sum())
    remainders = np.array([Fraction(int(each), int(weights.sum())) for each in products]) - shares
    order = sorted(range(len(weights)), key=lambda place: (-remainders[place], place))
    shares[order[: total - int(shares.sum())]] += 1
    return shares


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_exact_to_less_than_a_sample_up_to_10_to_the_9_steps(seed):
    random = np.random.default_rng(seed)
    weights = random.integers(1, 10**6, size=random.integers(2, 9))
    batch = -(-int(weights.sum()) // int(weights.min())) + int(random.integers(0, 1000))
    mixture = Mixture(
        tuple("abcdefgh"[: len(weights)]), (1,) * len(weights), (MixturePhase(0, tuple(weights.tolist())),)
    )
    for step in (*range(50), *random.integers(50, 10**9, 300).tolist()):
        drawn = mixture.counts_after(step * batch)
        after = mixture.counts_after((step + 1) * batch)
        assert drawn == tuple(largest_remainders(step * batch, weights))
        assert sum(drawn) == step * batch
        assert all(each >= 0 for each in np.subtract(after, drawn))
        for count, weight in zip(drawn, weights.tolist(), strict=True):
            assert abs(count - Fraction(step * batch * weight, int(weights.sum()))) < 1


def test_phases_go_on_from_where_the_one_before_ended():
    phases = (MixturePhase(0, (1, 0, 2)), MixturePhase(30, (0, 1, 1)), MixturePhase(50, (1, 1, 1)))
    mixture = Mixture(("a", "b", "c"), (5, 5, 10), phases)
    assert [mixture.counts_after(samples) for samples in (0, 3, 30, 40, 50, 56)] == [
        (0, 0, 0),
        (1, 0, 2),
        (10, 0, 20),
        (10, 5, 25),
        (10, 10, 30),
        (12, 12, 32),
    ]
    assert mixture.epochs(56) == [2.4, 2.4, 3.2]


def test_ties_and_fractions():
    assert apportion(0, (1, 2)) == [0, 0]
    assert apportion(10, (1, 1, 1)) == [4, 3, 3]
    assert apportion(2, (1, 1, 1)) == [1, 1, 0]
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([1 / 3, 2 / 3]) == (1, 2)
    assert whole_weights([2.0, 0.0, 4.0]) == (1, 0, 2)
