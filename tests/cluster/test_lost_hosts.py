"""Jobs whose hosts lose their network or their daemon."""

import os

import pytest

from tiny_jobs import ENDLESS, TWO_NODES, stop_for_good

pytestmark = pytest.mark.slow


def test_a_host_that_is_cut_off_is_replaced(submit, cluster):
    """The host without the batch script."""
    job = submit(*ENDLESS, options=TWO_NODES)
    job.wait_until(lambda job: job.last_step >= 60)
    assert job.show("NodeList") == "h[1-2]"
    cluster.cut_off("h2")
    job.wait_until(lambda job: job.starts == 2)
    assert job.show("NodeList") == "h[1,3]"
    job.wait_for_training(start=2)
    stop_for_good(job)
    job.assert_no_survivors()


def test_a_host_that_is_cut_off_but_alive_publishes_nothing(submit, cluster):
    """It continues to train alone while its job already runs elsewhere, in the same run folder."""
    job = submit(*ENDLESS, options=("--cpus-per-task=2", "--nodes=1"))
    job.wait_until(lambda job: job.last_step >= 60)
    # The step has all of the job's CPUs, not one for its one task.
    assert len(os.sched_getaffinity(job.rank(0))) == min(2, len(os.sched_getaffinity(0)))
    host = job.show("NodeList")
    with job.paused(rank=0) as old:
        cluster.cut_off(host)
        job.wait_for_training(start=2)
        assert old in job.processes()
    job.wait_until(lambda job: old not in job.processes())
    stop_for_good(job)
    (log,) = job.logs.glob("*.log")
    assert "attempt 2 on " in log.read_text()
    assert "has taken over" in log.read_text()
    # The batch script of the first start still asks Slurm for another one, in vain; nothing of the training is left.
    job.assert_no_survivors("train.py")
