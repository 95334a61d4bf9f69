"""Jobs that are asked to stop, preempted, killed and canceled, and resume."""

import os
import re
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from largebatch.storage.files import read_json_lines
from tiny_jobs import (
    ENDLESS,
    ONE_PROCESS,
    TWO_NODES,
    assert_logged_once,
    assert_same_weights,
    assert_stops_with_the_weights_of,
    launch_with,
)

pytestmark = pytest.mark.slow

# A pre-flight at the job's first start alone, which does not end before somebody ends it.
PREFLIGHT_ONCE = f"""
[[ $1 == preflight ]] || exec {sys.prefix}/bin/largebatch "$@"
[[ $LARGEBATCH_RESTART == 0 ]] || exit 0
{sys.prefix}/bin/largebatch "$@" && exec sleep 3600
"""

# Stands in for W&B, which would refuse numbers that go back; what it keeps on the disk survives a process.
WANDB = """
import json, os
from types import SimpleNamespace
config = SimpleNamespace(update=lambda *_, **__: None)

def init(id, resume, dir, **_):
    def write(**line):
        with open(f"{dir}/wandb.jsonl", "a") as file:
            print(json.dumps({"id": id, "mode": os.environ["WANDB_MODE"], **line}), file=file)

    write(resume=resume)
    return SimpleNamespace(
        define_metric=lambda *_, **__: None,
        log=lambda values, step: write(number=step, step=values["step"]),
        finish=lambda: write(finished=True),
    )
"""


def test_canceled_it_is_gone_and_near_its_time_limit_it_is_requeued(submit, cluster, uninterrupted):
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
    assert canceled.log.count(f" job {canceled.id}, start ") == 1
    canceled.assert_no_survivors()

    # Of twenty minutes the last eighteen are left alone; the first two are enough to get going on a slow machine.
    margin = 18 * 60
    options = (*TWO_NODES, "--time=20", "--signal=B:USR1@5")
    job = submit(*ENDLESS, f"--faults.time_limit_margin_seconds={margin}", options=options)
    job.wait_for_training(start=1)
    limit = datetime.fromisoformat(job.show("EndTime")).timestamp()
    with job.paused(rank=0):
        assert_a_stopped_process_is_named(submit, cluster)
        time.sleep(max(0, limit - margin - time.time()))
    job.wait_until(lambda job: "] stopped by the end of the job's time limit, after step" in job.log)
    # The next start gets an hour.
    cluster.command("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    events = {line["event"]: line["time"] for line in read_json_lines(job.run_dir / "history.jsonl")}
    assert limit - margin <= events["stopped"] < limit
    job.wait_for_training(start=2)
    assert_stops_with_the_weights_of(uninterrupted, job)
    job.assert_no_survivors()


def assert_a_stopped_process_is_named(submit, cluster):
    """With its host, by the others, which wait for it in a collective; the job is requeued."""
    job = submit(*ENDLESS, "--faults.hang_seconds=20", options=TWO_NODES, name="hanging")
    job.wait_until(lambda job: job.last_step >= 20)
    hosts = job.show("NodeList")
    with job.paused(rank=1):
        job.wait_until(lambda job: "; requeued" in job.log)
    cluster.command("scancel", job.id)
    assert hosts == "h[1-2]"
    ending = re.search(
        r"\] failed: hang: no progress for (\d+) s, .* rank 1 \(h2, process \d+\) wrote no stack: stopped, .*; "
        r"rank 0 waited in \w+ number \d+ of group .*; requeued",
        job.log,
    )
    assert ending, job.log
    assert 20 <= int(ending[1]) <= 60


def test_a_dead_launcher_leaves_no_orphans_and_fewer_nodes_go_on(submit, cluster, uninterrupted, tmp_path):
    last_step = tmp_path / "last_step"
    programs = launch_with(f"--train.stop_after_steps=$(<{last_step})", f"[[ -s {last_step} ]]")
    # Two processes and one round differently.
    words = (*ENDLESS, "--precision=fp64")
    job = submit(*words, options=(*ONE_PROCESS, "--nodes=1-2", "--exclude=h3"), programs=programs)
    job.wait_until(lambda job: job.last_step >= 60)
    assert "on 2 nodes x 1 processes" in job.log
    with job.paused(rank=0):
        # The next start has an end. What is logged may lag behind a checkpoint by less than 20 steps.
        last = job.last_step + 200
        last_step.write_text(str(last))
        cluster.command("scontrol", "update", "NodeName=h2", "State=DRAIN", "Reason=test")
        launcher = int(Path(f"/proc/{job.rank(1)}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(launcher, signal.SIGKILL)
    assert job.wait_for_end() == "COMPLETED", job.log
    assert "on 1 nodes x 1 processes" in job.log
    assert (job.status["outcome"], job.starts) == ("finished", 2)
    uninterrupted_run = uninterrupted((*words, f"--train.stop_after_steps={last}"), 1)
    assert_same_weights(job.run_dir, uninterrupted_run, 1e-5)
    assert_logged_once(job, last)
    job.assert_no_survivors()


def test_signaled_killed_and_preempted_it_ends_bit_for_bit(submit, cluster, uninterrupted, tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wandb.py").write_text(WANDB)
    job = submit(
        *ENDLESS,
        '--logging.trackers=["wandb"]',
        options=TWO_NODES,
        programs={"largebatch": PREFLIGHT_ONCE},
        LARGEBATCH_PREFLIGHT="on",
        PYTHONPATH=str(tmp_path / "modules"),
        WANDB_MODE="offline",
    )
    job.wait_until(lambda job: list((job.logs / "preflight").glob("listening.*")))
    cluster.command("scancel", "--signal=TERM", job.id)
    job.wait_until(lambda job: "asked to stop by a signal to the nodes before the run began" in job.log)

    job.wait_until(lambda job: job.last_step >= 60)
    os.kill(job.rank(1), signal.SIGKILL)
    job.wait_until(lambda job: job.log.count("; requeued") == 2)
    assert "] failed: rank 1 on h2: Signal 9 (SIGKILL) received by PID " in job.log

    # As `--signal=B:USR1@…` does.
    job.wait_for_training(start=3)
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until(lambda job: job.log.count("; requeued") == 3)
    assert f"] stopped by the batch script of job {job.id}, after step" in job.log

    job.wait_for_training(start=4)
    everything = ("--partition=urgent", "--nodes=3", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 2")
    cluster.command("sbatch", *everything)
    job.wait_until(lambda job: job.log.count("; requeued") == 4)
    assert "] stopped by SIGTERM, after step" in job.log

    job.wait_for_training(start=5)
    assert_stops_with_the_weights_of(uninterrupted, job)
    assert job.starts == 5
    job.assert_no_survivors()

    lines = read_json_lines(job.run_dir / "trackers/wandb.jsonl")
    assert [line["resume"] for line in lines if "resume" in line] == ["allow"] * 4
    assert sum("finished" in line for line in lines) == 3
    assert len({line["id"] for line in lines}) == 1
    assert {line["mode"] for line in lines} == {"offline"}
    shown = [line for line in lines if "number" in line]
    numbers = [line["number"] for line in shown]
    assert numbers == sorted(set(numbers))
    # A process that is killed may not have handed over its last second.
    assert {line["step"] for line in shown} <= {1, *range(20, job.status["step"] + 1, 20)}
    assert shown[-1]["step"] == job.status["step"] // 20 * 20
