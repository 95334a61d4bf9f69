"""What an evaluation refuses."""

import re
from types import SimpleNamespace

import pytest
import torch

from largebatch.errors import DataError, UserError
from largebatch.run.evaluate import Evaluator, mean_over_samples
from largebatch.run.record.metrics import Stopwatch


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


class Mixed:
    """Four samples, of which the first two are a part."""

    def __init__(self):
        self.parts = {"web": range(2)}

    def __len__(self):
        return 4

    def fetch(self, indices, _epoch):
        return {"x": torch.from_numpy(indices)}

    def weight(self, batch):
        return len(batch["x"])


def test_values_of_two_sets_under_one_name():
    plan = SimpleNamespace(
        evaluation_of=lambda _: SimpleNamespace(samples_of=lambda count: count),
        loss_unit="samples",
        micro_batch_size=4,
    )
    backend = SimpleNamespace(
        plan=plan,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        model=torch.nn.Identity(),
        average_statistics=lambda _: None,
        all_gather=lambda values: values.unsqueeze(0),
    )
    evaluator = Evaluator(backend, 0, Stopwatch(), lambda: None)

    def evaluate(name, value):
        return evaluator.means(Mixed(), lambda batch: {value: batch["x"].double()}, 1, name)

    assert evaluate(None, "loss") == evaluate(None, "loss") == {"loss": 1.5, "loss/web": 0.5}
    assert evaluate("shifted", "loss") == {"shifted/loss": 1.5, "shifted/loss/web": 0.5}
    # The part "web" of the loss, a set named "shifted", and what every line of evaluations.jsonl has.
    for name, value in (("loss", "web"), (None, "shifted/loss"), (None, "step")):
        with pytest.raises(UserError, match=r"^run.evaluate: two values are named '.*'; give this one, or its set"):
            evaluate(name, value)
