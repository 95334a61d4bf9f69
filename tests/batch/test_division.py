"""A batch that does not divide: the error names what would fit."""

import pytest

from largebatch.batch import gradient_accumulation_steps
from largebatch.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            (512, 4, 24),
            r"512 is not a multiple of micro_batch_size x world_size = 4 x 24 = 96; nearest: 480, 576",
        ),
        # Micro-batch sizes that keep the global batch.
        ((64, 5, 8), r"set batch\.micro_batch_size to 4 or 8"),
        # Nothing below the smallest possible batch is offered.
        ((50, 32, 3), r"nearest: 96$"),
    ],
)
def test_error_says_what_would_divide(sizes, words):
    with pytest.raises(ConfigError, match=words):
        gradient_accumulation_steps(*sizes)
