"""Accumulation follows from global, micro and world, or the error names what would fit."""

import pytest

from largebatch.batch import gradient_accumulation_steps
from largebatch.errors import ConfigError


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "expected"),
    [(8192, 32, 256, 1), (8192, 32, 8, 32), (64, 16, 2, 2), (96, 4, 24, 1), (7, 7, 1, 1), (30, 2, 3, 5)],
)
def test_exact(global_batch_size, micro_batch_size, world_size, expected):
    assert gradient_accumulation_steps(global_batch_size, micro_batch_size, world_size) == expected


def test_error_names_both_nearest_sizes():
    with pytest.raises(ConfigError) as caught:
        gradient_accumulation_steps(512, 4, 24)
    assert "512 is not a multiple of micro_batch_size x world_size = 4 x 24 = 96; nearest: 480, 576" in str(
        caught.value
    )


def test_error_offers_micro_batch_sizes_that_keep_the_global_batch():
    with pytest.raises(ConfigError, match=r"set batch\.micro_batch_size to 4 or 8"):
        gradient_accumulation_steps(64, 5, 8)


def test_nothing_below_the_smallest_possible_batch_is_offered():
    with pytest.raises(ConfigError, match=r"nearest: 96$"):
        gradient_accumulation_steps(50, 32, 3)
