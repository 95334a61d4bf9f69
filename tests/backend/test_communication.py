"""Equal samples need no communication of their weights in the loss."""

from types import SimpleNamespace

import pytest
import torch

import tasks
from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.run.feed import training_feed
from paths import PYDOC


@pytest.mark.parametrize(
    ("words", "sums"), [((), 0), (("--data.samples=documents", "--data.num_train_samples=2000"), 3)]
)
def test_equal_samples_need_no_communication_of_weights(words, sums):
    text_sources = tasks.sources("causal_lm")
    counts = []
    config = load_config(PYDOC, (*words, "--train.stop_after_steps=3"))
    backend = SimpleNamespace(
        plan=resolve(config, 2),
        rank=1,
        device=torch.device("cpu"),
        processes=SimpleNamespace(sum_over_processes=lambda count: counts.append(count) or (lambda: count)),
    )
    feed = training_feed(backend, text_sources(config)[0], 0, 0, iter)
    for number, step in enumerate(feed, 1):
        assert step.total_weight() > 0
        micro_steps = [next(step.micro_steps), next(step.micro_steps)]
        assert len(micro_steps) == 2
        # The next step's data are loaded when this step's passes have been launched, and not before.
        assert len(counts) == min(number, sums)
        assert list(step.micro_steps) == []
        assert len(counts) == min(number + 1, sums)
    assert len(counts) == sums
