"""What an evaluation refuses."""

import re
from types import SimpleNamespace

import pytest
import torch

from largebatch.errors import DataError
from largebatch.run.evaluate import mean_over_samples


@pytest.mark.parametrize(
    ("shapes", "words"),
    [(((8, 64), (8,)), "values of 'mae' have shape (8, 64)"), (((8,), (8, 64)), "weights of 'mae' have shape (8, 64)")],
)
def test_the_tensor_of_a_wrong_shape_is_named(shapes, words):
    sums_and_weights = tuple(torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=re.escape(f"the evaluation's {words}; return one per sample")):
        mean_over_samples(None, [(0, 8, {})], lambda _: {"mae": sums_and_weights})


def test_a_part_with_nothing_to_average_over_has_no_mean():
    backend = SimpleNamespace(all_gather=lambda values: values.unsqueeze(0))
    sums_and_weights = (torch.tensor([2.0, 4.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 0.0, 0.0]))
    parts = {"web": range(2), "hollow": range(2, 4)}
    means = mean_over_samples(backend, [(0, 4, {})], lambda _: {"loss": sums_and_weights}, parts)
    assert means == {"loss": 2.0, "loss/web": 2.0}


def test_a_source_without_samples_is_refused():
    with pytest.raises(DataError, match="nothing to evaluate: the source has no samples"):
        mean_over_samples(None, [], lambda _: {"loss": torch.ones(1)})
