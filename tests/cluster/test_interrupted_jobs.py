"""Jobs that are asked to stop, preempted, killed and canceled, and resume."""

import os
import re
import signal
import sys
from datetime import datetime

import pytest

import stand_in
from largebatch.run.checkpoint.export import export
from largebatch.storage.files import read_json_lines
from resuming import assert_same_weights
from stand_in import MARGIN_SECONDS
from tiny_jobs import (
    ENDLESS,
    LAUNCH,
    ONE_PROCESS,
    TWO_NODES,
    assert_logged_once,
    stop_for_good,
)

pytestmark = pytest.mark.slow

# A pre-flight at the job's first start alone, which does not end before somebody ends it.
PREFLIGHT_ONCE = f"""
[[ $1 == preflight ]] || exec {sys.prefix}/bin/largebatch "$@"
[[ $LARGEBATCH_RESTART == 0 ]] || exit 0
touch "$LARGEBATCH_LOGS/preflight/began.$LARGEBATCH_NODE"
exec sleep 3600
"""


def test_canceled_it_is_gone_and_near_its_time_limit_it_is_requeued(submit, cluster):
    canceled = submit(*ENDLESS, options=TWO_NODES)
    canceled.wait_until(lambda job: job.last_step >= 60)
    # The same job by mistake: canceled before it trains, it does not stop this one.
    waits = {"largebatch": f'[[ $1 != preflight ]] || exec sleep 600; exec {sys.prefix}/bin/largebatch "$@"'}
    again = submit(*ENDLESS, options=ONE_PROCESS, programs=waits, LARGEBATCH_PREFLIGHT="on")
    again.wait_until(lambda job: any("sleep 600" in process.command for process in job.processes().values()))
    cluster.command("scancel", again.id)
    assert again.wait_for_end() == "CANCELLED"
    assert (again.run_dir / f"stop.{again.id}").exists()
    before = canceled.last_step
    canceled.wait_until(lambda job: job.last_step > before + 60)
    cluster.command("scancel", canceled.id)
    assert canceled.wait_for_end() == "CANCELLED"
    assert canceled.starts == 1
    canceled.assert_no_survivors()

    job = submit(*ENDLESS, options=(*TWO_NODES, "--time=3", "--signal=B:USR1@5"), name="limited")
    job.wait_for_training(start=1)
    limit = datetime.fromisoformat(job.show("EndTime")).timestamp()
    job.wait_until(lambda job: "] stopped by the end of the job's time limit, after step" in job.log)
    # The next start gets an hour.
    cluster.command("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    stopped = datetime.fromisoformat(re.search(r"\[(.{19})\] stopped by the end", job.log)[1]).timestamp()
    assert limit - MARGIN_SECONDS <= stopped < limit
    job.wait_for_training(start=2)
    stop_for_good(job)
    job.assert_no_survivors()


def test_after_a_failure_fewer_nodes_go_on(submit, cluster, tmp_path):
    last_step = tmp_path / "last_step"
    programs = {
        "accelerate": stand_in.program(f"$([[ ! -s {last_step} ]] || echo --train.stop_after_steps=$(<{last_step}))")
    }
    job = submit(*ENDLESS, options=(*ONE_PROCESS, "--nodes=1-2", "--exclude=h3"), programs=programs)
    job.wait_until(lambda job: job.last_step >= 60)
    assert "on 2 nodes x 1 processes" in job.log
    with job.paused(rank=0):
        # The next start has an end.
        last = job.last_step + 200
        last_step.write_text(str(last))
        cluster.command("scontrol", "update", "NodeName=h2", "State=DRAIN", "Reason=test")
        os.kill(job.rank(1), signal.SIGKILL)
    assert job.wait_for_end() == "COMPLETED", job.log
    assert "on 1 nodes x 1 processes" in job.log
    assert (job.ending.kind, job.ending.step, job.starts) == ("finished", last, 2)
    assert_logged_once(job)
    job.assert_no_survivors()


def test_signaled_and_preempted_it_goes_on(submit, cluster):
    job = submit(*ENDLESS, options=TWO_NODES, programs={"largebatch": PREFLIGHT_ONCE}, LARGEBATCH_PREFLIGHT="on")
    # On both nodes: Slurm does not keep a signal for a task that has not started.
    job.wait_until(lambda job: len(list((job.logs / "preflight").glob("began.*"))) == 2)
    cluster.command("scancel", "--signal=TERM", job.id)
    job.wait_until(lambda job: "asked to stop by a signal to the nodes before the run began" in job.log)

    # As `--signal=B:USR1@…` does.
    job.wait_for_training(start=2)
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until(lambda job: job.log.count("; requeued") == 2)
    assert "] stopped by the batch script, after step" in job.log

    job.wait_for_training(start=3)
    everything = ("--partition=urgent", "--nodes=3", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 2")
    cluster.command("sbatch", *everything)
    job.wait_until(lambda job: job.log.count("; requeued") == 3)
    assert "] stopped by SIGTERM, after step" in job.log

    job.wait_for_training(start=4)
    stop_for_good(job)
    assert job.starts == 4
    assert_logged_once(job)
    job.assert_no_survivors()


def test_a_training_that_is_killed_goes_on_bit_for_bit(submit, uninterrupted):
    job = submit(*ENDLESS, options=TWO_NODES, programs={"accelerate": LAUNCH})
    job.wait_until(lambda job: job.last_step >= 60)
    os.kill(job.rank(1), signal.SIGKILL)
    job.wait_until(lambda job: job.log.count("; requeued") == 1)
    assert "] failed: h2: Signal 9 (SIGKILL) received by PID " in job.log

    job.wait_for_training(start=2)
    stop_for_good(job)
    step = job.ending.step
    export(job.run_dir, job.run_dir / "model", None)
    words = (*ENDLESS, f"--train.stop_after_steps={step}")
    assert_same_weights(job.run_dir / "model", uninterrupted(words, 2) / "model")
    assert [line["step"] for line in read_json_lines(job.run_dir / "metrics.jsonl")] == [1, *range(20, step + 1, 20)]
    assert job.starts == 2
    job.assert_no_survivors()
