"""How jobs are launched: under other strategies, as they were told to, and not on what the pre-flight refuses."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

from paths import PYDOC, ROOT
from resuming import TINY_GPT
from slurm_job import Job
from tiny_jobs import TWO_NODES, WORDS, assert_same_weights

pytestmark = pytest.mark.slow

SMALL_GPT = (
    *TINY_GPT,
    "--model.dropout=0.0",
    "--optimizer.eps=1e-3",
    "--evaluation.every=null",
    "--batch.micro_batch_size=12",
    "--logging.every=20",
    '--train.duration={"steps": 40}',
)
# What would be launched is printed.
TOLD = f"""exec {sys.executable} -c "import json, sys; print('GOT', json.dumps(sys.argv[1:]))" "$@" """
ONLY_TOLD = {"largebatch": "exit 0", "accelerate": TOLD}


def test_strategies_on_the_same_two_hosts_at_once(submit, uninterrupted):
    """Their ports must not collide, and none may join another's processes."""
    options = (*TWO_NODES, "--nodelist=h1,h2")
    secrets = {"WANDB_API_KEY": "secret-of-wandb", "HF_TOKEN": "secret-of-the-hub"}
    jobs = {
        name: submit(*SMALL_GPT, options=options, name=name, recipe=PYDOC, programs={}, STRATEGY=name, **secrets)
        for name in ("fsdp", "zero3")
    }
    reference = uninterrupted(SMALL_GPT, 1, PYDOC)
    for strategy, job in jobs.items():
        assert job.wait_for_end() == "COMPLETED", job.log
        assert "all-reduce of 64 MiB over 2 nodes by gloo" in job.log
        assert f"on 2 x {strategy}" in job.log
        assert_same_weights(job.run_dir, reference, 1e-5)
        assert {path.name for path in (job.run_dir / f"slurm/{job.id}/start_0").glob("*.log")} == {"h1.log", "h2.log"}
        for path in (job.log_file, job.run_dir, *job.run_dir.rglob("*")):
            assert not path.stat().st_mode & 0o002, f"{path} is world-writable"
            assert path.is_dir() or b"secret-of-" not in path.read_bytes(), path
        job.assert_no_survivors()


def test_words_arrive_as_they_were_given(submit):
    """Spaces, quotes, `$` and `;` in options and in the run folder's name; no shell looks at them again."""
    words = ("--data.path", "a b", "--x=\"$HOME\" '$(id)' `id` ; exit 5", "--y", "*", "")
    job = submit(*words, options=TWO_NODES, name='it\'s $HOME `x` "q"', programs=ONLY_TOLD)
    assert job.wait_for_end() == "COMPLETED", job.log
    got = [json.loads(line.split("GOT ")[1]) for line in job.log.splitlines() if line.startswith("GOT ")]
    assert len(got) == 2
    for arguments in got:
        assert arguments[arguments.index("--config") :] == [
            "--config",
            "tests/outside_task/maps.json",
            "--run-dir",
            str(job.run_dir),
            *words,
        ]
    assert sorted(arguments[arguments.index("--machine_rank") + 1] for arguments in got) == ["0", "1"]


def test_submit(cluster, play, tmp_path):
    options = ("--nodes", "2", "--cpus-per-task=1", f"--output={tmp_path}/%x.%j.log", "--strategy", "zero2")
    words = ("submit", "gpt_pydoc", *options, "--seed", "7", "--run-dir", str(tmp_path / "run"))
    environment = {"LARGEBATCH_ENV": str(play(**ONLY_TOLD))}
    output = cluster.command(sys.executable, "-m", "largebatch", *words, environment=environment, cwd=ROOT)
    number = re.search(r"^job (\d+)$", output, re.MULTILINE)[1]
    log = tmp_path / f"gpt_pydoc.sbatch.{number}.log"
    assert f"follow tail -F {log}" in output
    job = Job(cluster, number, tmp_path / "run", log)
    assert job.wait_for_end() == "COMPLETED", job.log
    assert f"job {number}, start 0: recipes/causal_lm/gpt_pydoc.json under zero2 on 2 nodes x 1 processes" in job.log
    assert '"--seed", "7"]' in job.log


def test_a_job_that_always_fails_is_given_up(submit):
    programs = {"largebatch": "exit 0", "accelerate": "exit 1"}
    job = submit(*WORDS, options=TWO_NODES, programs=programs, LARGEBATCH_MAX_RESTARTS="1")
    assert job.wait_for_end() == "FAILED"
    assert job.starts == 2
    assert "giving up after 2 starts without progress past step 0 (LARGEBATCH_MAX_RESTARTS)" in job.log
    assert job.exit_code == "1:0"
    job.assert_no_survivors()


# --- what the pre-flight finds on its nodes ---------------------------------------------------------------------------


def test_what_cannot_be_trained_is_not_requeued(submit):
    job = submit(*WORDS, "--batch.micro_batch_size=7", options=("--cpus-per-task=1", "--nodes=1"), programs={})
    assert job.wait_for_end() == "FAILED"
    assert (job.exit_code, job.starts) == ("2:0", 1)
    assert "batch.global_batch_size: 24 is not a multiple of batch.micro_batch_size 7" in job.log
    assert not (job.run_dir / "status.json").exists()


def test_a_host_with_another_package_is_left_out(submit, cluster, tmp_path):
    files = importlib.metadata.files("safetensors")
    metadata = next(Path(file.locate()) for file in files if file.name == "METADATA")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 9", 1))
    cluster.on_host("h2", "mount", "--bind", str(other), str(metadata))
    job = submit(*WORDS, options=TWO_NODES, programs={"accelerate": TOLD}, LARGEBATCH_EXCLUDE_BAD_NODES="1")
    assert job.wait_for_end() == "COMPLETED", job.log
    version = importlib.metadata.version("safetensors")
    assert f"bad node h2: safetensors is 9{version}, but {version} on 1 node" in job.log
    assert "bad nodes: h2; requeued" in job.log
    assert job.starts == 2
    assert job.show("NodeList") == "h[1,3]"
    # Nothing was launched by the start that was refused.
    assert job.log.count("GOT ") == 2


def test_an_unshared_folder_and_a_blocked_port(submit, cluster, tmp_path):
    options = (*TWO_NODES, "--nodelist=h1,h2")
    own = tmp_path / "own"
    own.mkdir()
    cluster.on_host("h2", "mount", "-t", "tmpfs", "none", str(own))
    unshared = submit(*WORDS, options=options, name="unshared", programs={}, RUN_DIR=str(own / "run"))
    blocked = submit(*WORDS, options=(*options, "--hold"), name="blocked", programs={})
    port = str(10000 + int(blocked.id) * 16 % 22000)
    cluster.on_host("h2", "ip", "rule", "add", "ipproto", "tcp", "dport", port, "prohibit")
    cluster.command("scontrol", "release", blocked.id)
    for job in (unshared, blocked):
        assert job.wait_for_end() == "FAILED"
        assert (job.exit_code, job.starts) == ("3:0", 1)
        assert "training was not started" in job.log
        assert job.log.count("bad node") == 1
        job.assert_no_survivors()
    assert "bad node h2: " in unshared.log
    assert "is not the folder that the batch script wrote to" in unshared.log
    assert f"bad node h1: h2 cannot connect to h1 on port {port}" in blocked.log
