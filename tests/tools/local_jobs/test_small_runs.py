"""A long schedule, with all that happens in it, fits into a few steps."""

import pytest

from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.tools.local_jobs.small_runs import short_schedule_overrides
from paths import PYDOC
from tasks import TINY


def test_every_part_of_a_long_schedule_occurs_in_its_first_steps():
    milestones = '{"name": "step", "at": [{"epochs": 0.6}, {"epochs": 0.8}], "factor": 0.1}'
    sizes = '[{"from": {"steps": 0}, "size": 24}, {"from": {"steps": 100}, "size": 48}]'
    words = [
        "--learning_rate.decay",
        milestones,
        "--batch.global_batch_size",
        sizes,
        "--learning_rate.scaling=none",
    ]
    for steps, length in ((1, 4), (12, 12)):
        config = load_config(PYDOC, [*TINY, *words])
        short = short_schedule_overrides(config, steps)
        plan = resolve(load_config(PYDOC, [*TINY, *words, *short]), 1)
        assert plan.total_steps == length
        assert plan.batch_at(0).global_batch_size == 24
        assert plan.batch_at(length - 1).global_batch_size == 48
        rates = [plan.lr_of(plan.batch_at(step)) for step in range(length)]
        peak = max(rates)
        last = rates[-1]
        assert rates[0] == 0
        assert last == pytest.approx(peak / 100)
        assert any(rate == pytest.approx(peak / 10) for rate in rates)


def test_a_ramp_goes_through_a_few_of_its_sizes():
    ramp = '--batch.global_batch_size={"start": 8, "end": 256, "increment": 8, "over": {"steps": 200}}'
    words = [*TINY, ramp, '--train.duration={"steps": 300}', "--learning_rate.scaling=none"]
    short = short_schedule_overrides(load_config(PYDOC, words), 3)
    plan = resolve(load_config(PYDOC, [*words, *short]), 1)
    assert [plan.batch_at(step).size for step in range(plan.total_steps)] == [8, 72, 136, 200, 256, 256]
