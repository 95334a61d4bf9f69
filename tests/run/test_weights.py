"""Samples that weigh differently, down to nothing."""

import numpy as np
import pytest

from jobs import failure_of, run_job
from largebatch.config import load_config
from largebatch.task_folders import import_from
from paths import MAPS
from test_strategies import assert_same, recorded

pytestmark = pytest.mark.slow

# One pixel of each map may be labeled.
WORDS = (
    "--data.side=5",
    "--border.width=2",
    "--model.channels=[4]",
    '--batch={"global_batch_size": 8, "micro_batch_size": 2}',
    '--optimizer={"name": "adamw", "weight_decay": 0.1, "eps": 1e-3}',
    "--learning_rate.warmup=null",
)


def test_processes_without_a_target(tmp_path):
    """In most steps some process has no target at all."""
    source, _ = import_from(MAPS.parent, "data").sources(load_config(MAPS, WORDS), None)
    is_labeled = source.weight(source.fetch(np.arange(200), 0)).sum((1, 2)) > 0
    assert 0.2 < is_labeled.float().mean() < 0.8
    alone, shared = (
        run_job(recorded, MAPS, tmp_path / strategy, *WORDS, strategy=strategy, world_size=world_size)[0]
        for strategy, world_size in (("single", 1), ("zero3", 4))
    )
    assert_same(shared, alone)


def record_without_labels(run_dir):
    import_from(MAPS.parent, "data").MapSource.weight = lambda _, batch: 0 * batch["weights"]
    return recorded(MAPS, run_dir, *WORDS)


def test_a_step_without_any_target_is_refused(run_dir):
    """After the first, on every process alike: there is nothing to take a mean over."""
    report = failure_of(record_without_labels, run_dir)
    assert "error: no sample of step 1 has a target, so there is nothing to average the loss over" in report
    assert "exit code 1" in report
