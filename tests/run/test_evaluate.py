"""What an evaluation refuses."""

import re

import pytest
import torch

from largebatch.run.evaluate import mean_over_samples


@pytest.mark.parametrize(
    ("shapes", "words"),
    [(((8, 64), (8,)), "values of 'mae' have shape (8, 64)"), (((8,), (8, 64)), "weights of 'mae' have shape (8, 64)")],
)
def test_the_tensor_of_a_wrong_shape_is_named(shapes, words):
    sums_and_weights = tuple(torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=re.escape(f"the evaluation's {words}; return one per sample")):
        mean_over_samples(None, [(0, 8, {})], lambda _: {"mae": sums_and_weights})
