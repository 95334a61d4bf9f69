"""When the weights of unequal samples in the loss are summed; that equal ones need no sum is in test_traffic.py."""

from types import SimpleNamespace

import torch

import tasks
from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.run.feed import training_feed
from paths import ADDITION


def test_weights_are_summed_while_the_step_before_is_computed():
    counts = []
    words = ('--batch={"global_batch_size": 32, "micro_batch_size": 8}', "--train.stop_after_steps=3")
    config = load_config(ADDITION, words)
    backend = SimpleNamespace(
        plan=resolve(config, 2),
        rank=1,
        device=torch.device("cpu"),
        sum_over_processes=lambda count: counts.append(count) or (lambda: count),
    )
    feed = training_feed(backend, tasks.sources("sft")(config)[0], 0, 0, iter)
    for number, step in enumerate(feed, 1):
        assert step.total_weight() > 0
        for _ in range(2):
            next(step.micro_steps)
        # The next step's data are loaded when this step's passes have been launched, and not before.
        assert len(counts) == number
        # A recipe may leave the loop in the last one.
        if number != 2:
            assert list(step.micro_steps) == []
            assert len(counts) == min(number + 1, 3)
    assert len(counts) == 3
