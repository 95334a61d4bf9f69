"""Jobs of the shipped batch scripts: trained, asked to stop, preempted, killed, cut off, gone on with, and refused.

All in one file, since two workers of pytest would take a file each, and there can be one cluster.
"""

import importlib.metadata
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from largebatch.checkpoint.export import export
from largebatch.storage.json_lines import read_json_lines
from paths import ROOT
from resuming import TINY_GPT, run_interrupted
from slurm_job import Job

# A model so small that a job is all launch, and AdamW with an epsilon that does not enlarge rounding.
WORDS = (
    *TINY_GPT,
    "--model.dropout=0.0",
    "--optimizer.eps=1e-3",
    "--evaluation.every=null",
    "--batch.micro_batch_size=12",
    "--logging.every=20",
)
# One process a node.
ONE_PROCESS = ("--cpus-per-task=1",)
TWO_NODES = (*ONE_PROCESS, "--nodes=2")
# Long enough for what happens to a job; and without end, for as long as Slurm needs to notice that a host is gone.
SHORT, ENDLESS = 2000, 100_000


def steps(number, checkpoint_every=None):
    words = (f'--train.duration={{"steps": {number}}}',)
    return words if checkpoint_every is None else (*words, f'--checkpoint.every={{"steps": {checkpoint_every}}}')


def assert_same_weights(mine, theirs, tolerance):
    mine, theirs = (load_file(run_dir / "model/model.safetensors") for run_dir in (mine, theirs))
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        difference = np.linalg.norm(mine[name] - weight) / max(np.linalg.norm(weight), 1e-8)
        assert difference <= tolerance, (name, difference)


def assert_logged_once(job, last):
    assert [line["step"] for line in read_json_lines(job.run_dir / "metrics.jsonl")] == [1, *range(20, last + 1, 20)]


def assert_stopped_with_the_weights_of(job, words, uninterrupted):
    """Stop a job that would go on without end, and compare it with a run of as many steps."""
    (job.run_dir / "stop").touch()
    assert job.wait_for_end() == "FAILED"
    assert job.exit_code == "75:0", job.log
    step = job.status["step"]
    export(job.run_dir, job.run_dir / "model", None)
    assert_same_weights(job.run_dir, uninterrupted((*words, f"--train.stop_after_steps={step}"), 2), 0)
    assert_logged_once(job, step)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The runs that jobs are compared with: one host, no Slurm, nothing happens to them."""
    runs = {}

    def run(words, world_size):
        if (words, world_size) not in runs:
            run_dir = runs[words, world_size] = tmp_path_factory.mktemp("uninterrupted") / "run"
            strategy = "single" if world_size == 1 else "ddp"
            assert run_interrupted(run_dir, words, strategy=strategy, world_size=world_size) is None
        return runs[words, world_size]

    return run


def test_every_strategy_on_the_same_two_hosts_at_once(submit, uninterrupted):
    """Their ports must not collide, and none may join another's processes."""
    words = (*WORDS, *steps(40))
    options = (*TWO_NODES, "--nodelist=h1,h2")
    strategies = ("ddp", "fsdp", "zero2", "zero3")
    secrets = {"WANDB_API_KEY": "secret-of-wandb", "HF_TOKEN": "secret-of-the-hub"}
    jobs = {
        name: submit("gpt_pydoc", *words, options=options, name=name, STRATEGY=name, **secrets) for name in strategies
    }
    for strategy, job in jobs.items():
        assert job.wait_for_end() == "COMPLETED", job.log
        assert "all-reduce of 64 MiB over 2 nodes by gloo" in job.log
        assert f"on 2 x {strategy}" in job.log
        assert_same_weights(job.run_dir, uninterrupted(words, 1), 1e-5)
        assert {path.name for path in (job.run_dir / f"slurm/{job.id}/start_0").glob("*.log")} == {"h1.log", "h2.log"}
        for path in (job.log_file, job.run_dir, *job.run_dir.rglob("*")):
            assert not path.stat().st_mode & 0o002, f"{path} is world-writable"
            assert path.is_dir() or b"secret-of-" not in path.read_bytes(), path
        job.assert_no_survivors()


def test_signalled_killed_and_preempted_it_ends_bit_for_bit(submit, cluster, uninterrupted):
    words = (*WORDS, *steps(SHORT, checkpoint_every=100))
    job = submit("gpt_pydoc", *words, options=TWO_NODES)

    job.wait_until(lambda job: (job.run_dir / f"slurm/{job.id}/start_0/preflight/h1.present").exists())
    cluster.command("scancel", "--signal=TERM", job.id)
    job.wait_until(lambda job: "asked to stop by a signal to the nodes during the pre-flight; requeued" in job.log, 60)

    job.wait_until(lambda job: job.last_step >= 60)
    cluster.command("scancel", "--signal=TERM", job.id)
    job.wait_until(lambda job: job.log.count("; requeued") == 2, 60)
    assert "] stopped by SIGTERM" in job.log

    job.wait_until(lambda job: job.starts == 3 and job.last_step >= 360)
    os.kill(job.rank(1), signal.SIGKILL)
    job.wait_until(lambda job: job.log.count("; requeued") == 3, 60)
    assert "] failed: h2: Signal 9 (SIGKILL) received by PID " in job.log

    # As `--signal=B:USR1@…` does.
    job.wait_until(lambda job: job.starts == 4 and job.last_step >= 660)
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until(lambda job: job.log.count("; requeued") == 4, 60)
    assert "] stopped by SIGUSR1 to the batch script, after step" in job.log

    job.wait_until(lambda job: job.starts == 5 and job.last_step >= 960)
    everything = ("--partition=urgent", "--nodes=3", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 2")
    cluster.command("sbatch", *everything)
    job.wait_until(lambda job: job.log.count("] stopped by SIGTERM") == 2, 60)

    assert job.wait_for_end() == "COMPLETED", job.log
    assert (job.status["outcome"], job.starts) == ("finished", 6)
    assert_same_weights(job.run_dir, uninterrupted(words, 2), 0)
    assert_logged_once(job, SHORT)
    job.assert_no_survivors()


def test_near_its_time_limit_it_stops_and_goes_on_bit_for_bit(submit, uninterrupted):
    words = (*WORDS, *steps(ENDLESS, checkpoint_every=100))
    options = (*TWO_NODES, "--time=2", "--signal=B:USR1@5")
    # Each start has a minute, of which 15 to 40 seconds go before the first step.
    job = submit("gpt_pydoc", *words, "--faults.time_limit_margin_seconds=60", options=options)
    job.wait_until(lambda job: job.starts == 2, 180)
    assert "] stopped by the end of the job's time limit" in job.log
    before = job.last_step
    job.wait_until(lambda job: job.last_step > before)
    assert_stopped_with_the_weights_of(job, words, uninterrupted)


def test_a_dead_launcher_leaves_no_orphans_and_fewer_nodes_go_on(submit, cluster, uninterrupted):
    words = (*WORDS, *steps(1500, checkpoint_every=100))
    job = submit("gpt_pydoc", *words, options=(*ONE_PROCESS, "--nodes=1-2", "--exclude=h3"))
    job.wait_until(lambda job: job.last_step >= 200)
    assert "on 2 nodes x 1 processes" in job.log
    cluster.command("scontrol", "update", "NodeName=h2", "State=DRAIN", "Reason=test")
    launcher = int(Path(f"/proc/{job.rank(1)}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(launcher, signal.SIGKILL)
    try:
        assert job.wait_for_end() == "COMPLETED", job.log
    finally:
        cluster.command("scontrol", "update", "NodeName=h2", "State=RESUME")
    assert "on 1 nodes x 1 processes" in job.log
    assert_same_weights(job.run_dir, uninterrupted(words, 1), 1e-5)
    assert_logged_once(job, 1500)
    job.assert_no_survivors()


def test_a_host_that_is_cut_off_or_dies_is_replaced(submit, cluster, uninterrupted):
    """Of two hosts, the one without the batch script: the first loses its network, the next its daemon."""
    words = (*WORDS, *steps(ENDLESS, checkpoint_every=200))
    job = submit("gpt_pydoc", *words, "--faults.hang_seconds=20", options=TWO_NODES)
    job.wait_until(lambda job: job.last_step >= 60)
    assert job.show("NodeList") == "h[1-2]"
    cluster.cut_off("h2")
    try:
        job.wait_until(lambda job: job.starts == 2 and job.show("NodeList") == "h[1,3]", 90)
    finally:
        cluster.join_again("h2")

    before = job.last_step
    job.wait_until(lambda job: job.last_step > before)
    cluster.kill_slurmd("h3")
    try:
        job.wait_until(lambda job: job.starts == 3 and job.show("NodeList") == "h[1-2]", 90)
        before = job.last_step
        job.wait_until(lambda job: job.last_step > before)
        assert_stopped_with_the_weights_of(job, words, uninterrupted)
    finally:
        cluster.start_slurmd("h3")
    # Those that were left alone ended by their own watchdog.
    job.assert_no_survivors()


def test_a_host_that_is_cut_off_but_alive_publishes_nothing(submit, cluster, uninterrupted):
    """It trains on alone while its job already runs elsewhere, on the same run folder."""
    words = (*WORDS, *steps(ENDLESS, checkpoint_every=200))
    job = submit("gpt_pydoc", *words, options=("--cpus-per-task=2", "--nodes=1"))
    job.wait_until(lambda job: job.last_step >= 60)
    host, old = job.show("NodeList"), job.rank(0)
    cluster.cut_off(host)
    try:
        job.wait_until(lambda job: job.starts == 2, 90)
        assert old in job.processes()
        before = job.last_step
        job.wait_until(lambda job: old not in job.processes() and job.last_step > before)
        assert_stopped_with_the_weights_of(job, words, uninterrupted)
    finally:
        cluster.join_again(host)
    (log,) = (job.run_dir / f"slurm/{job.id}/start_0").glob("*.log")
    assert "attempt 2 on " in log.read_text()
    assert "has taken over" in log.read_text()
    job.assert_no_survivors()


def test_a_job_that_always_fails_is_given_up(submit, tmp_path):
    activate = Path(sys.prefix) / "bin/activate"
    (tmp_path / "env").write_text(f"source {activate}; accelerate() {{ return 1; }}; export -f accelerate\n")
    settings = {"LARGEBATCH_ENV": str(tmp_path / "env"), "LARGEBATCH_MAX_RESTARTS": "1"}
    job = submit("gpt_pydoc", *WORDS, options=TWO_NODES, **settings)
    assert job.wait_for_end() == "FAILED"
    assert job.starts == 2
    assert "2 starts came no further than step 0: given up (LARGEBATCH_MAX_RESTARTS)" in job.log
    assert job.exit_code == "1:0"
    job.assert_no_survivors()


def test_what_cannot_be_trained_is_not_requeued(submit):
    job = submit("gpt_pydoc", *WORDS, "--batch.micro_batch_size=7", options=TWO_NODES)
    assert job.wait_for_end() == "FAILED"
    assert (job.exit_code, job.starts) == ("2:0", 1)
    assert "batch.global_batch_size: 24 is not a multiple of batch.micro_batch_size 7" in job.log
    assert not (job.run_dir / "status.json").exists()


def test_cancelled_it_is_gone_and_the_stop_file_ends_it_for_good(submit, cluster, uninterrupted):
    words = (*WORDS, *steps(SHORT, checkpoint_every=100))
    job = submit("gpt_pydoc", *words, options=TWO_NODES)
    job.wait_until(lambda job: job.last_step >= 100)
    cluster.command("scancel", job.id)
    job.assert_no_survivors()
    assert job.wait_for_end() == "CANCELLED"
    assert job.starts == 1

    again = submit("gpt_pydoc", *words, options=TWO_NODES)
    again.wait_until(lambda job: job.starts == 1 and job.status["slurm_job_id"] == job.id and job.last_step >= 500)
    (again.run_dir / "stop").touch()
    assert again.wait_for_end() == "FAILED"
    assert (again.exit_code, again.starts) == ("75:0", 1)
    assert "stopped by the stop file, after step" in again.log
    again.assert_no_survivors()

    last = submit("gpt_pydoc", *words, options=TWO_NODES)
    assert last.wait_for_end() == "COMPLETED", last.log
    assert_same_weights(last.run_dir, uninterrupted(words, 2), 0)


@pytest.fixture
def only_told(tmp_path):
    """An environment in which nothing is trained: what would be launched is printed."""
    told = "import json, sys; print('GOT', json.dumps(sys.argv[1:]))"
    for name, text in (("largebatch", "exit 0"), ("accelerate", f'{sys.executable} -c "{told}" "$@"')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "only_told"
    file.write_text(f"PATH={tmp_path}:$PATH\n")
    return {"LARGEBATCH_ENV": str(file)}


def test_words_arrive_as_they_were_given(submit, only_told):
    """Spaces, quotes, `$` and `;` in options and in the run folder's name; no shell looks at them again."""
    words = ("--data.path", "a b", "--x=\"$HOME\" '$(id)' `id` ; exit 5", "--y", "*", "")
    job = submit("gpt_pydoc", *words, options=TWO_NODES, name='it\'s $HOME `x` "q"', **only_told)
    assert job.wait_for_end() == "COMPLETED", job.log
    got = [json.loads(line.split("GOT ")[1]) for line in job.log.splitlines() if line.startswith("GOT ")]
    assert len(got) == 2
    for arguments in got:
        assert arguments[arguments.index("--config") :] == [
            "--config",
            "recipes/causal_lm/gpt_pydoc.json",
            "--run_dir",
            str(job.run_dir),
            *words,
        ]
    assert sorted(arguments[arguments.index("--machine_rank") + 1] for arguments in got) == ["0", "1"]


def test_submit(cluster, only_told, tmp_path):
    options = ("--nodes", "2", "--cpus-per-task=1", f"--output={tmp_path}/%x.%j.log", "--strategy", "zero2")
    words = ("submit", "gpt_pydoc", *options, "--seed", "7", "--run_dir", str(tmp_path / "run"))
    output = cluster.command(sys.executable, "-m", "largebatch", *words, environment=only_told, cwd=ROOT)
    number = re.search(r"^job (\d+)$", output, re.MULTILINE)[1]
    log = tmp_path / f"gpt_pydoc.{number}.log"
    assert f"follow tail -F {log}" in output
    job = Job(cluster, number, tmp_path / "run", log)
    assert job.wait_for_end() == "COMPLETED", job.log
    assert f"job {number}, start 0: recipes/causal_lm/gpt_pydoc.json under zero2 on 2 nodes x 1 processes" in job.log
    assert '"--seed", "7"]' in job.log


# --- what the pre-flight finds on its nodes ---------------------------------------------------------------------------


def test_a_host_with_another_package_is_left_out(submit, cluster, tmp_path):
    files = importlib.metadata.files("safetensors")
    metadata = next(Path(file.locate()) for file in files if file.name == "METADATA")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 9", 1))
    cluster.on_host("h2", "mount", "--bind", str(other), str(metadata))
    try:
        job = submit("gpt_pydoc", *WORDS, *steps(20), options=TWO_NODES, LARGEBATCH_EXCLUDE_BAD_NODES="1")
        assert job.wait_for_end() == "COMPLETED", job.log
    finally:
        cluster.on_host("h2", "umount", str(metadata))
    version = importlib.metadata.version("safetensors")
    assert f"bad node h2: safetensors is 9{version} there, and {version} on the other node" in job.log
    assert "bad nodes: h2; requeued" in job.log
    assert job.starts == 2
    assert job.show("NodeList") == "h[1,3]"
    assert "on 2 x ddp" in job.log


def test_an_unshared_folder_and_a_blocked_port(submit, cluster, tmp_path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    options = (*TWO_NODES, "--nodelist=h1,h2")
    cluster.on_host("h2", "mount", "-t", "tmpfs", "none", str(own))
    unshared = submit("gpt_pydoc", *WORDS, options=options, name="unshared", RUN_DIR=str(own / "run"))
    blocked = submit("gpt_pydoc", *WORDS, options=(*options, "--hold"), name="blocked", RUN_DIR=str(shared))
    rule = ("ipproto", "tcp", "dport", str(10000 + int(blocked.id) * 16 % 22000), "prohibit")
    cluster.on_host("h2", "ip", "rule", "add", *rule)
    try:
        cluster.command("scontrol", "release", blocked.id)
        for job in (unshared, blocked):
            assert job.wait_for_end() == "FAILED"
            assert (job.exit_code, job.starts) == ("3:0", 1)
    finally:
        cluster.on_host("h2", "ip", "rule", "del", *rule)
        cluster.on_host("h2", "umount", str(own))
    assert "bad node h2: " in unshared.log
    assert "is not the folder that the batch script wrote to" in unshared.log
    assert "bad node h1: h2 cannot connect to h1 at port " + rule[3] in blocked.log
    for job in (unshared, blocked):
        assert "training was not started" in job.log
        assert job.log.count("bad node") == 1
        job.assert_no_survivors()
