"""Which norms of a gradient are spikes, which share of a run's time counted, and waits for data, by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from largebatch.config.sections import Faults
from largebatch.errors import TrainingFailed
from largebatch.run.bad_steps import BadSteps
from largebatch.run.record.metrics import goodput
from largebatch.run.record.task_metrics import TaskMetrics
from largebatch.run.resume import Start
from largebatch.system.endings import OwnEnding
from recording import begin


def bad_steps(**faults):
    backend = SimpleNamespace(plan=SimpleNamespace(faults=Faults(**faults)))
    return BadSteps(backend, Start(), recorder=None, writer=None)


def test_the_largest_norm_that_is_no_spike():
    steps = bad_steps(spike={"sigmas": 2.0, "window": 4})
    for norm in (1.0, 2.0, 3.0):
        steps.accept(torch.tensor(norm))
        assert steps.max_norm() == float("inf")
    steps.accept(torch.tensor(4.0))
    # The mean is 2.5; the squared deviations sum to 5, of which the variance is a third.
    assert steps.max_norm() == pytest.approx(2.5 + 2 * (5 / 3) ** 0.5, rel=1e-12)
    steps.accept(torch.tensor(11.0))
    # Of 2, 3, 4 and 11: the mean is 5, the squared deviations sum to 50.
    assert steps.max_norm() == pytest.approx(5 + 2 * (50 / 3) ** 0.5, rel=1e-12)
    assert steps.for_manifest() == {"bad_steps": 0, "grad_norms": (2.0, 3.0, 4.0, 11.0)}


@pytest.mark.parametrize(("policy", "limit"), [("stop", None), ("skip", float("inf")), ("roll_back", float("inf"))])
def test_without_spikes_any_finite_norm(policy, limit):
    steps = bad_steps(on_non_finite=policy)
    steps.accept(torch.tensor(1.0))
    assert steps.max_norm() == limit
    assert steps.for_manifest()["grad_norms"] == ()


def test_goodput():
    history = [
        {"event": "started", "time": 1000.0, "step": 0},
        {"event": "skipped", "time": 1050.0, "first_skipped_step": 5, "step": 6},
        {"event": "started", "time": 1200.0, "step": 4},
        # The same steps, after the restart.
        {"event": "skipped", "time": 1250.0, "first_skipped_step": 5, "step": 6},
    ]
    # Of 100 seconds of training in 10 steps, 8 steps counted, in 200 seconds since the start.
    assert goodput(history, 10, 100.0, 1200.0) == 0.4
    # Another restart applied step 6.
    assert goodput([*history, {"event": "started", "time": 1300.0, "step": 5}], 10, 100.0, 1400.0) == 0.225
    assert goodput([], 10, 100.0, 1200.0) is None


def test_a_line_has_the_mean_wait_for_data_since_the_line_before(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    metrics = begin(tmp_path, OwnEnding()).metrics

    def slow():
        nonlocal now
        for seconds in (4, 2, 1, 3, 2):
            now += seconds
            yield seconds

    waits = []
    for step, _ in enumerate(metrics.timed(slow()), 1):
        metrics.add(step, torch.tensor(1.0), 1.0, None, TaskMetrics())
        if step in (2, 5):
            waits.append(metrics.log(step, dict)["data_wait_seconds"])
        else:
            # As before an evaluation.
            metrics.check()
    assert waits == [3.0, 2.0]


def test_a_number_that_is_not_finite_fails_unless_its_step_was_not_taken(tmp_path):
    metrics = begin(tmp_path, OwnEnding()).metrics
    one = torch.tensor(1.0)
    for step, norm in enumerate((None, one, one * math.nan), 1):
        metrics.add(step, one, 1.0, norm, TaskMetrics())
    metrics.discard(3)
    metrics.check()
    for first, loss, told in (
        (4, one, "the gradient's norm is inf at step 5.* Try a longer learning_rate.warmup"),
        (4, one * math.nan, "the loss is nan at step 5 on rank 0.* Try a longer learning_rate.warmup"),
        (0, one, r"norm is inf at step 1; .* written\. No weights had been trained: look at the initial weights"),
        (0, one * math.nan, r"the loss is nan at step 1 on rank 0; .* written\. No weights had been trained"),
    ):
        metrics.add(first, one, 1.0, None, TaskMetrics())
        metrics.add(first + 1, loss, 1.0, one * math.inf, TaskMetrics())
        with pytest.raises(TrainingFailed, match=told):
            metrics.check()
