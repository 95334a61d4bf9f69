"""The stateless shuffle: a bijection, unbiased, and the same global batches for every way to share them out."""

import numpy as np
import pytest

from largebatch.batch import Length, Timeline
from largebatch.data.order import Permutation, TrainingOrder, derive_seed, epoch_order


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1437, 99991])
def test_every_element_exactly_once(size):
    assert np.array_equal(np.sort(Permutation(size, key=12345)(np.arange(size))), np.arange(size))


def test_seeds_and_epochs_give_other_orders():
    orders = [epoch_order(1000, seed, epoch)(np.arange(1000)) for seed in (0, 1) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            # Two independent permutations agree in one place on average.
            assert (order == other).sum() < 10


def test_first_and_neighboring_elements_are_uniform():
    """Chi-squared over 4,000 keys: of the first element, and of the distance between the first two."""
    size = 20
    keys = 4000
    firsts = np.array([Permutation(size, derive_seed(key))(np.arange(2)) for key in range(keys)])
    for values, cells in ((firsts[:, 0], size), ((firsts[:, 1] - firsts[:, 0]) % size - 1, size - 1)):
        counts = np.bincount(values, minlength=cells)
        expected = keys / cells
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        # 19 degrees of freedom: above 43.8 in one of a thousand.
        assert chi_squared < 43.8


def one_of(order, step, micro_step, rank):
    return next(order.micro_batches([(step, micro_step)], rank))


BATCHES_OF_24 = Timeline.build(100, [(Length("steps", 0), 24)])


def test_model_seed_depends_on_step_and_place_alone():
    """Process 1's first micro-batch on two processes is the second one of a single process."""
    alone = TrainingOrder(BATCHES_OF_24, 4, 1, seed=5)
    shared = TrainingOrder(BATCHES_OF_24, 4, 2, seed=5)
    assert one_of(shared, 7, 0, rank=1).seed == one_of(alone, 7, 1, rank=0).seed
    seeds = {one_of(alone, step, micro_step, 0).seed for step in range(10) for micro_step in range(6)}
    assert len(seeds) == 60


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 22), (1, 4), (2, 4), (3, 2), (4, 8), (7, 1)])
def test_a_ragged_batch_is_shared_out_exactly(world_size, micro_batch_size):
    """The last 22 of 100 samples after two batches of 39: each one counts once, on whatever process."""
    timeline = Timeline.build(100, [(Length("steps", 0), 39)], keep_last=True)
    order = TrainingOrder(timeline, micro_batch_size, world_size, seed=5)
    micro_steps = -(-22 // (micro_batch_size * world_size))
    work = [one_of(order, 2, number, rank) for number in range(micro_steps) for rank in range(world_size)]
    counted = [int(index) for micro_batch in work if micro_batch.contributes for index in micro_batch.indices]
    assert counted == epoch_order(100, 5, 0)(np.arange(78, 100)).tolist()
    # A process without samples goes through one of another, so that all make the same number of passes.
    assert all(micro_batch.indices.tolist() == counted[:1] for micro_batch in work if not micro_batch.contributes)


def test_many_micro_batches_at_once_are_those_of_one_at_a_time():
    """Over several epochs, ragged ends, and more than are shuffled at once."""
    timeline = Timeline.build(50, [(Length("steps", 0), 12), (Length("steps", 40), 24)], keep_last=True)
    order = TrainingOrder(timeline, micro_batch_size=4, world_size=2, seed=3)
    places = [(step, number) for step in range(70) for number in range(2 if step < 40 else 3)]
    for rank in range(2):
        together = list(order.micro_batches(places, rank))
        assert len(together) == len(places) > 2 * 64
        np.testing.assert_equal(together, [one_of(order, *place, rank) for place in places])
    assert not all(found.contributes for found in together)
    assert {found.epoch for found in together} > {0, 1, 2}
