"""Contrastive recipes: what is refused, and what the plan says."""

import pytest

from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.plan import explain, resolve
from paths import SIMCLR
from problems import problem_of


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.hidden_sizes=[16, 24]"], "model.hidden_sizes[1]: given 24; must be a multiple of 16"),
        (["--neighbors.count=101"], "neighbors.count: 101 is more than the 100 samples"),
        (["--neighbors.bank_samples=1500"], "neighbors.bank_samples: 1500 is more than the 1437 training samples"),
        (["--batch.global_batch_size=1", "--batch.micro_batch_size=1"], "a single sample has no others to be compared"),
    ],
)
def test_refused(words, message):
    assert message in problem_of(*words, recipe=SIMCLR)


def test_the_plan_says_that_the_batch_is_part_of_the_loss():
    plan = resolve(load_config(SIMCLR), 2)
    assert plan.coupled_features == 64
    assert "changing global_batch_size changes the loss" in explain(plan, "title")
    twice = "each sample is encoded twice, first without gradients, per step, and compared with all 256"
    assert twice in explain(plan, "title")
    once = resolve(load_config(SIMCLR, ["--batch.micro_batch_size=128"]), 2)
    assert "each sample is encoded once per step, and compared with all 256" in explain(once, "title")
    with pytest.raises(ConfigError, match='"one_pass" takes one micro-batch per process, but there are 4'):
        resolve(load_config(SIMCLR, ["--compute.couple=one_pass"]), 2)
