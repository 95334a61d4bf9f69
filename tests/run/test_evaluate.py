"""What an evaluation refuses."""

import math
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jobs import run_job
from largebatch.backend.launch import read_launch
from largebatch.backend.processes import Processes
from largebatch.backend.start import start
from largebatch.config import load_config
from largebatch.errors import DataError, TrainingFailed, UserError
from largebatch.plan import resolve
from largebatch.run.coupled import CoupledBatch
from largebatch.run.evaluate import Evaluator, mean_over_samples
from largebatch.run.record.metrics import Stopwatch
from paths import DIGITS

RECORDER = SimpleNamespace(step=1, metrics=SimpleNamespace(stopwatch=Stopwatch()))


@pytest.mark.parametrize(("values", "weights", "named"), [((8, 64), (8,), "values"), ((8,), (8, 64), "weights")])
def test_the_tensor_of_a_wrong_shape_is_named(values, weights, named):
    sums_and_weights = (torch.ones(values), torch.ones(weights))
    with pytest.raises(ValueError, match=rf"{named} of 'mae' have shape \(8, 64\); return one per sample"):
        mean_over_samples(None, [(0, 8, {})], lambda _: {"mae": sums_and_weights})


def test_a_part_with_nothing_to_average_over_has_no_mean():
    sums_and_weights = (torch.tensor([2.0, 4.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 0.0, 0.0]))
    parts = {"web": range(2), "hollow": range(2, 4)}
    means = mean_over_samples(Processes(0, 1, 4), [(0, 4, {})], lambda _: {"loss": sums_and_weights}, parts)
    assert means == {"loss": 2.0, "loss/web": 2.0}


def test_a_source_without_samples_is_refused():
    with pytest.raises(DataError, match="nothing to evaluate: the source has no samples"):
        mean_over_samples(Processes(0, 1, 4), [], lambda _: {"loss": torch.ones(1)})


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


def alone(**plan):
    """What an evaluator asks of one process."""
    plan = SimpleNamespace(
        evaluation_of=lambda _: SimpleNamespace(samples_of=lambda count: count),
        loss_unit="samples",
        micro_batch_size=4,
        **plan,
    )
    return SimpleNamespace(
        plan=plan,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        model=torch.nn.Linear(1, 1),
        statistics=SimpleNamespace(average=lambda *_: None),
        gather_objects=lambda mine: [mine],
    )


def test_averaged_weights_are_compared_with_what_they_make():
    backend = alone(optimizer=SimpleNamespace(ema_half_life=1))
    weight = backend.model.weight

    @contextmanager
    def averaged_weights():
        weight.data += 1
        yield
        weight.data -= 1

    backend.averaged_weights = averaged_weights
    made = {}

    def difference(batch):
        assert not backend.model.training
        return {"difference": (weight - made["weight"]).detach().expand(len(batch["x"]), 1).flatten()}

    def before():
        assert not torch.is_grad_enabled()
        made["weight"] = weight.clone()

    means = Evaluator(backend, 0, RECORDER, lambda: None).means(Mixed(), difference, None, before)
    assert means["difference"] == means["ema/difference"] == 0


def test_values_of_two_sets_under_one_name_and_one_that_is_not_finite():
    evaluator = Evaluator(alone(optimizer=SimpleNamespace(ema_half_life=None)), 0, RECORDER, lambda: None)

    def evaluate(name, value, factor=1.0):
        return evaluator.means(Mixed(), lambda batch: {value: factor * batch["x"].double()}, name, lambda: None)

    assert evaluate(None, "loss") == evaluate(None, "loss") == {"loss": 1.5, "loss/web": 0.5}
    assert evaluate("shifted", "loss") == {"shifted/loss": 1.5, "shifted/loss/web": 0.5}
    # The part "web" of the loss, a set named "shifted", and what every line of evaluations.jsonl has.
    for name, value in (("loss", "web"), (None, "shifted/loss"), (None, "step")):
        with pytest.raises(UserError, match=r"^run.evaluate: two values are named '.*'; give this one, or its set"):
            evaluate(name, value)
    with pytest.raises(TrainingFailed, match="the evaluation's loss is nan after step 1; training stopped"):
        evaluate(None, "loss", math.nan)
    with pytest.raises(ValueError, match="values of 'loss' have shape"):
        evaluate(None, "loss", torch.ones(3, 1))
    assert evaluator.backend.model.training


class Texts:
    """Sample i is a text of i letters, in batches as wide as their longest."""

    def __len__(self):
        return 10

    def fetch(self, indices, _epoch):
        return {"text": torch.from_numpy(np.tri(11, dtype=np.int64)[indices, : indices.max() + 1])}

    def weight(self, batch):
        return len(batch["text"])


def texts(batch):
    return {"text": batch["text"]}


def lengths(batch):
    return {"length": batch["text"].sum(dim=1)}


def dtypes_of_batches(batch):
    return {"length": batch["text"].sum(dim=1).to(torch.float32 if batch["text"].shape[1] > 4 else torch.float64)}


def names_of_batches(batch):
    return {f"length_{batch['text'].shape[1]}": batch["text"].sum(dim=1)}


def use_rows_of_batches():
    """What is gathered, and what is refused, with one and with several batches per process."""
    backend = start(read_launch(), resolve(load_config(DIGITS, ["--batch.micro_batch_size=4"]), world_size=2))
    backend.model = torch.nn.Identity()
    backend.statistics = SimpleNamespace(average=lambda *_: None)
    rows = partial(Evaluator(backend, 0, RECORDER, lambda: None).rows, Texts())
    refused = []
    for call in (
        lambda: rows(8, per_sample=texts),
        lambda: rows(10, per_sample=texts),
        lambda: rows(8, per_sample=dtypes_of_batches),
        lambda: rows(8, per_sample=names_of_batches),
        # One micro-batch of two features on the first process, and of three on the second.
        lambda: CoupledBatch(backend, 8, [{"features": torch.zeros(4, 2 + backend.rank)}], lambda *_: None, True),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.everywhere
        refused.append(str(caught.value))
    start_of_mine = 4 * backend.rank
    mine = [(start_of_mine, start_of_mine + 4, {"text": torch.ones(4, 3 + backend.rank)})]
    means = mean_over_samples(backend, mine, names_of_batches)
    return refused, rows(10, per_sample=lengths)["length"].tolist(), means


@pytest.mark.slow
def test_rows_that_differ_from_batch_to_batch_are_refused_on_all_processes():
    (refused, found, means), other = run_job(use_rows_of_batches)
    assert (refused, found, means) == other
    rest = "; make them equal: pad to a fixed width"
    assert refused == [
        "run.rows: batches have rows 'text' (4,) torch.int64 or 'text' (8,) torch.int64" + rest,
        # The second process has no samples in the second round, for which it gets the first one's text.
        "run.rows: batches have rows 'text' (1,) torch.int64 or 'text' (8,) torch.int64" + rest,
        "run.rows: batches have rows 'length' () torch.float32 or 'length' () torch.float64" + rest,
        "run.rows: batches have rows 'length_4' () torch.int64 or 'length_8' () torch.int64" + rest,
        "step.couple: batches have rows 'features' (2,) torch.float32 or 'features' (3,) torch.float32" + rest,
    ]
    assert found == list(range(1, 11))
    # A value that only some batches have is a mean over their samples.
    assert means == {"length_3": 3.0, "length_4": 4.0}
