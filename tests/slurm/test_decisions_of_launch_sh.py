"""What slurm/launch.sh decides in cases that are hard to bring about on a real cluster, with Slurm's commands played.

The real ones are in tests/cluster.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from paths import ROOT

# In the manner of Slurm's commands, as far as launch.sh uses them.
COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; export SLURM_NODEID=0 SLURMD_NODENAME=n1; exec "$@"',
    "scontrol": """case $2 in
      hostnames) printf '%s\\n' $HOSTS ;;
      job) echo "   ReqNodeList=(null) ExcNodeList=$EXCLUDED_BEFORE" ;;
      *) echo "scontrol $*"; exit "$SCONTROL_CODE" ;;
    esac""",
    "squeue": '[[ $SQUEUE_CODE == 0 ]] && if [[ $* == *%e* ]]; then echo "$END"; else echo "$STATE"; fi',
    # The second and third try would be far away.
    "sleep": "",
    "sbatch": 'echo "sbatch $*"',
    "largebatch": 'if [[ $1 == preflight-verdict ]]; then echo "$BAD_NODES" >"${@: -1}"; fi; exit "$PREFLIGHT_CODE"',
}
NODE = """
[[ $# == 0 ]] || exit 9
accelerate() {
  env >"$RUN_DIR/environment"
  printf '%s\n' "$@" >"$RUN_DIR/words"
  if [[ -n $STATUS ]]; then printf '%s' "$STATUS" >"$RUN_DIR/status.json"; fi
  if [[ -n $REFUSAL ]]; then printf '%s' "$REFUSAL" >"$LARGEBATCH_REFUSAL"; fi
  return "$TRAIN_CODE"
}; export -f accelerate
"""
REQUEUED = "scontrol requeue 5"
RECIPE = Path("recipes/causal_lm/gpt_pydoc.json")


def status(outcome, message, resume, job="5", restart=0):
    value = {"outcome": outcome, "message": message, "resume": resume, "step": 7, "checkpoint_step": 0, "attempt": 1}
    return json.dumps(value | {"slurm_job_id": job, "slurm_restart_count": restart, "time": 1.5}, indent=2)


@pytest.fixture
def start(tmp_path):
    """One start of a job: its exit code, its log, and the environment that was trained in."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "node").write_text(NODE)
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_PARTITION": "main"}
    played = {"STATE": "RUNNING", "END": "N/A", "STATUS": "", "REFUSAL": "", "SQUEUE_CODE": "0", "SCONTROL_CODE": "0"}
    played |= {"HOSTS": "n1", "BAD_NODES": "", "EXCLUDED_BEFORE": "(null)"}
    codes = {"PREFLIGHT_CODE": "0", "TRAIN_CODE": "1"}
    paths = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN_DIR": str(tmp_path / "run"),
        "LARGEBATCH_ENV": str(tmp_path / "node"),
    }

    def run(*words, **changes):
        environment = {"HOME": "/", **job, **played, **codes, **paths, **changes}
        command = ["bash", "slurm/gpt_pydoc.sbatch", *words]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        file = tmp_path / "run/environment"
        lines = file.read_text().splitlines() if file.exists() else []
        trained_in = dict(line.split("=", 1) for line in lines if "=" in line)
        return result.returncode, result.stdout + result.stderr, trained_in

    return run


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"TRAIN_CODE": "0"}, 0, "finished"),
        ({"STATUS": status("failed", "the loss is nan", resume=False)}, 1, "failed: the loss is nan; the same start"),
        ({"STATUS": status("stopped", "by the stop file, after step 7", resume=True)}, 75, "by the stop file, after"),
        ({"REFUSAL": "batch: 3 is odd", "STATUS": status("finished", "", resume=False)}, 2, "refused: batch: 3 is odd"),
        (
            {"STATUS": status("failed", "nan", resume=False, restart=3), "SLURM_RESTART_COUNT": "3"},
            1,
            "failed: nan; the",
        ),
        # The controller says that somebody is ending the job.
        ({"STATUS": status("stopped", "by SIGTERM", resume=True), "STATE": "COMPLETING"}, 1, "is ending this start"),
        ({"STATUS": status("failed", "reset", resume=True), "SCONTROL_CODE": "1"}, 1, "the job cannot be requeued"),
        ({"LARGEBATCH_MAX_RESTARTS": "0"}, 1, "giving up after 1 starts without progress past step 0"),
        ({"PREFLIGHT_CODE": "3"}, 3, "training was not started"),
        ({"LARGEBATCH_ENV": "/nope"}, 2, "LARGEBATCH_ENV=/nope: there is no such file"),
        ({"STRATEGY": "none"}, 2, "there is no recipes/accelerate_configs/none.yaml"),
    ],
)
def test_it_ends(start, changes, code, words):
    returned, log, _ = start(**changes)
    assert (returned, REQUEUED in log) == (code, changes.get("SCONTROL_CODE") == "1"), log
    assert words in log


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"STATUS": status("failed", "reset by peer", resume=True)}, "failed: reset by peer; requeued"),
        (
            {"STATUS": status("stopped", "by SIGTERM, after step 7", resume=True)},
            "] stopped by SIGTERM, after step 7; ",
        ),
        # No time to say anything.
        ({"STATUS": status("running", "from step 0", resume=True)}, "killed at step 7; requeued"),
        ({}, "ended before the run began (exit code 1); requeued"),
        # What another job or an earlier start has left is not about this one.
        ({"STATUS": status("failed", "nan", resume=False, job="4")}, "ended before the run began"),
        ({"STATUS": status("failed", "nan", resume=False, job="55")}, "ended before the run began"),
        ({"STATUS": status("failed", "nan", resume=False, restart=11), "SLURM_RESTART_COUNT": "1"}, "before the run"),
        # A controller that does not answer is no reason to give up.
        ({"STATUS": status("failed", "reset", resume=True), "SQUEUE_CODE": "1"}, "failed: reset; requeued"),
        ({"PREFLIGHT_CODE": "143"}, "asked to stop by a signal to the nodes during the pre-flight; requeued"),
    ],
)
def test_it_is_requeued(start, changes, words):
    returned, log, _ = start(**changes)
    assert (returned, REQUEUED in log) == (0, True), log
    assert words in log


def test_a_message_is_only_shown(start):
    message = 'x "outcome": "finished", $(touch /tmp/no) `id` ; é\n"resume": false,'
    returned, log, _ = start(STATUS=status("failed", message, resume=True))
    assert (returned, REQUEUED in log) == (0, True)
    assert "$(touch /tmp/no) `id` ; " in log


def test_starts_without_progress_are_counted_over_lost_batch_hosts_too(start, tmp_path):
    """Slurm requeues a job whose first node is gone; the start before has not come to its end."""
    for restart in range(3):
        _, log, _ = start(SLURM_RESTART_COUNT=str(restart), LARGEBATCH_MAX_RESTARTS="2")
    assert "giving up after 3 starts without progress past step 0" in log
    returned, log, _ = start(SLURM_RESTART_COUNT="3", LARGEBATCH_MAX_RESTARTS="2")
    assert returned == 1
    assert "the earlier start was ended by Slurm; giving up after 3 starts" in log
    # A newer checkpoint is progress; one that is not complete is none.
    (tmp_path / "run/checkpoints/step_00000040").mkdir(parents=True)
    assert start(SLURM_RESTART_COUNT="4", LARGEBATCH_MAX_RESTARTS="2")[0] == 1
    (tmp_path / "run/checkpoints/step_00000040/complete.json").touch()
    returned, log, _ = start(SLURM_RESTART_COUNT="5", LARGEBATCH_MAX_RESTARTS="2")
    assert returned == 0
    assert "requeued, to resume from step 40" in log


def test_a_request_to_stop_from_before_the_start_is_taken_away(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    assert start(TRAIN_CODE="0")[0] == 0
    assert not (tmp_path / "run/stop").exists()


def test_bad_nodes_are_excluded_by_a_small_job(start):
    """Beside those that were excluded before; not if none would be left, nor if starts come no further."""
    bad = {"PREFLIGHT_CODE": "3", "LARGEBATCH_EXCLUDE_BAD_NODES": "1", "HOSTS": "n1 n2", "SLURM_JOB_NUM_NODES": "2"}
    bad |= {"BAD_NODES": "n2"}
    returned, log, _ = start(**bad, LARGEBATCH_MAX_RESTARTS="0")
    assert (returned, "sbatch" in log) == (1, False), log
    assert "bad nodes: n2; giving up after 1 starts without progress past step 0" in log
    returned, log, _ = start(**bad | {"BAD_NODES": "n1,n2"})
    assert (returned, "sbatch" in log) == (3, False), log
    for before, excluded in (("(null)", "n2"), ("n8,n9", "n2,n8,n9")):
        returned, log, _ = start(**bad, EXCLUDED_BEFORE=before, LARGEBATCH_MAX_RESTARTS="9")
        assert returned == 0, log
        assert "sbatch --job-name=without_n2 --partition=main " in log
        assert f" --exclude={excluded} " in log
        assert "bad nodes: n2; requeued, to resume from step 0" in log
        assert "scontrol requeuehold 5" in log


def test_what_is_trained_in(start):
    _, log, trained_in = start(SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="9", END="2026-11-22T00:00:00", TZ="UTC")
    assert "on 1 nodes x 2 processes" in log
    assert trained_in["OMP_NUM_THREADS"] == "4"
    assert trained_in["SLURM_JOB_END_TIME"] == "1795305600"
    assert trained_in["SRUN_CPUS_PER_TASK"] == "9"
    _, log, trained_in = start()
    assert "on 1 nodes x 1 processes" in log
    assert trained_in["OMP_NUM_THREADS"] == "1"
    assert trained_in["SLURM_JOB_END_TIME"] == ""
    assert "SRUN_CPUS_PER_TASK" not in trained_in


def test_only_the_first_start_of_a_job_begins_where_it_was_told(start, tmp_path):
    """Else a job that begins anew, or at some checkpoint, would do so after each requeue."""
    words = ("--resume", "none", "--seed", "1", "--allow-change", "seed")
    told = status("stopped", "by SIGTERM", resume=True)
    start(*words, STATUS=told)
    assert (tmp_path / "run/words").read_text().split()[-6:] == list(words)
    for again in (words, ("--resume=none", *words[2:])):
        start(*again, SLURM_RESTART_COUNT="1", STATUS=told)
        assert (tmp_path / "run/words").read_text().split()[-5:] == [str(tmp_path / "run"), *words[2:]]


def test_a_requeued_job_goes_on_with_the_files_that_its_run_began_with(start, tmp_path):
    kept = tmp_path / "run/source" / RECIPE.parent.name / RECIPE.name
    told = status("stopped", "by SIGTERM", resume=True)
    start(STATUS=told)
    kept.parent.mkdir(parents=True)
    kept.touch()
    for job, recipe in (("5", kept), ("6", RECIPE)):
        start(SLURM_RESTART_COUNT="1", SLURM_JOB_ID=job, STATUS=told)
        words = (tmp_path / "run/words").read_text().split()
        assert words[words.index("--config") - 1 :][:3] == [str(recipe.with_name("train.py")), "--config", str(recipe)]


def test_what_others_put_beside_checkpoints(start, tmp_path):
    folder = tmp_path / "run/checkpoints"
    for name in ("step_00000100.keep", "step_1,nodes[$(touch evaluated)]", "step_00000020"):
        (folder / name).mkdir(parents=True)
        (folder / name / "complete.json").touch()
    assert "requeued, to resume from step 20" in start()[1]
    returned, log, _ = start(LARGEBATCH_MAX_RESTARTS="nodes[$(touch evaluated)0]")
    assert (returned, "not a number" in log) == (2, True)
    assert not (ROOT / "evaluated").exists()


@pytest.mark.parametrize("word", ["--run-dir=x", "--run-dir", "--run_dir", "--config=x", "--config"])
def test_words_that_the_script_must_know_too(start, word):
    returned, log, _ = start(word)
    assert returned == 2
    assert f"error: {word.partition('=')[0]}: " in log


def test_outside_of_the_repository_and_of_slurm(tmp_path):
    script = ROOT / "slurm/gpt_pydoc.sbatch"
    result = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, "from the top of the repository" in result.stdout) == (2, True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    result = subprocess.run(["bash", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, "this is not a Slurm job" in result.stdout) == (2, True)
