"""Global batches against a plain loop over epochs, and moments worked out by hand."""

from fractions import Fraction

import pytest

from largebatch.batch import Length, Timeline
from reference import global_batches

RAMPS = [
    {0: 7},
    {0: 100},
    {0: 4, 5: 30, 6: 50, 40: 8},
    {0: 3, 34: 60, 35: 61},
    {0: 50, 1: 1, 51: 100},
]


def timeline_of(size_at, keep_last=False, samples=100):
    """Of samples with 8 tokens each, in batches of the sizes from these steps on."""
    return Timeline.build(samples, [(Length("steps", step), size) for step, size in size_at.items()], keep_last, 8)


@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("size_at", RAMPS)
def test_every_step_against_a_loop(size_at, keep_last):
    timeline = timeline_of(size_at, keep_last)
    expected = global_batches(100, size_at, keep_last, 300)
    found = [timeline.at(step) for step in range(300)]
    assert [(batch.epoch, batch.start, batch.size, batch.samples_before) for batch in found] == expected
    in_force = [size for step, size in size_at.items() if step <= 120][-1]
    assert timeline.at(120).global_batch_size == in_force


@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("size_at", RAMPS)
@pytest.mark.parametrize("unit", ["steps", "samples", "tokens", "epochs"])
def test_a_length_is_the_first_step_that_reaches_it(size_at, keep_last, unit):
    timeline = timeline_of(size_at, keep_last)
    progress = [timeline.progress(step, unit) for step in range(400)]
    assert progress == sorted(progress)
    amounts = [0.1, 0.5, 1.0, 1.37, 2.0] if unit == "epochs" else [1, 33, 100, 101]
    for amount in amounts:
        expected = next(step for step in range(400) if progress[step] >= Fraction(str(amount)))
        assert timeline.steps_in(Length(unit, amount)) == expected


def test_epochs_count_what_is_trained_on():
    """30 of 100 samples a step: an epoch is over after three, or with the last ten kept after four."""
    drop = timeline_of({0: 30})
    keep = timeline_of({0: 30}, keep_last=True)
    assert [3 * drop.progress(step, "epochs") for step in range(5)] == [0, 1, 2, 3, 4]
    assert [10 * keep.progress(step, "epochs") for step in range(5)] == [0, 3, 6, 9, 10]
    assert [keep.at(step).size for step in range(5)] == [30, 30, 30, 10, 30]


def test_units_of_the_moments_at_which_sizes_change():
    """Batches of 10 for 25 samples (3 steps), of 20 until 2 epochs, then of 50: 100 samples an epoch."""
    moments = [(Length("steps", 0), 10), (Length("samples", 25), 20), (Length("epochs", 2.0), 50)]
    timeline = Timeline.build(100, moments)
    # 30 samples in 3 steps; three more of 20 fill 90, and ten are dropped; five in the second epoch.
    assert [phase.first_step for phase in timeline.phases] == [0, 3, 11]
    assert timeline.at(11).samples_before == 90 + 100


def test_rounding_of_fractions_of_an_epoch():
    """0.1 epochs of 30 steps are 3 steps, though 0.1 x 30 is 3.0000000000000004."""
    timeline = timeline_of({0: 10}, samples=300)
    assert timeline.steps_in(Length("epochs", 0.1)) == 3
    assert timeline.steps_in(Length("epochs", 0.10001)) == 4
    assert timeline.steps_in(Length("epochs", 2 / 3)) == 20
    assert timeline.steps_in(Length("epochs", 1e-6)) == 1


def test_counting_back_from_the_end():
    timeline = timeline_of({0: 10, 5: 20})
    # 50 samples in 5 steps, then 20 a step: after 10 steps 140 (ten of the first epoch are dropped).
    assert timeline.steps_before(10, Length("samples", 41)) == 7
    assert timeline.steps_before(10, Length("samples", 40)) == 8
    assert timeline.steps_before(10, Length("steps", 10)) == 0
    assert timeline.steps_before(10, Length("steps", 11)) is None


def test_sizes_that_come_into_force_at_once_are_refused():
    with pytest.raises(ValueError, match="size 30 starts at 15 samples, which is step 2, not after step 2"):
        Timeline.build(100, [(Length("steps", 0), 10), (Length("samples", 11), 20), (Length("samples", 15), 30)])


def test_tokens_need_equal_samples():
    with pytest.raises(ValueError, match="the samples of this data have no fixed number"):
        Timeline.build(100, [(Length("steps", 0), 10)]).steps_in(Length("tokens", 5))
