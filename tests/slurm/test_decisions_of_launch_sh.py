"""What slurm/launch.sh does in cases that are hard to bring about on a real cluster, with all commands played.

The real ones are in tests/cluster, and the decisions about how a start has ended in tests/tools/job.
"""

import re

import pytest

from largebatch.storage.attempts import claim
from paths import ROOT
from played import ACCELERATE, copy_checkout, environment_in, run_bash, write_commands

# In the manner of Slurm's commands, as far as launch.sh uses them. One task plays all of a step's.
COMMANDS = {
    "srun": """
      printf '%s ' "$@" | tr '\\n' ' ' >>"$RUN_DIR/steps"; echo >>"$RUN_DIR/steps"
      while [[ $1 == --* ]]; do [[ $1 != --nodelist=* ]] || names=${1#*=}; shift; done
      export SLURMD_NODENAME=${names%%,*}
      [[ ${LABELED:-} ]] || exec "$@"
      set -o pipefail
      { echo welcome; "$@"; } | sed "s/^/0: /" """,
    "scontrol": """case "$*" in
      *hostnames*) printf '%s\\n' $HOSTS ;;
      *show*job*) echo "JobId=5 JobName=x $SHOWN" ;;
      *) echo "scontrol $*"; exit "$SCONTROL_CODE" ;;
    esac""",
    "squeue": '[[ $SQUEUE_CODE == 0 ]] && if [[ $* == *%e* ]]; then echo "$END"; else echo "$STATE"; fi',
    # The second and third try would be far away.
    "sleep": "",
    "sbatch": 'printf "sbatch %s %s\\n" "${SLURM_RESTART_COUNT:-}" "$*" >&2; echo 6; exit "$SBATCH_CODE"',
    "largebatch": """case $1 in
      snapshot) mkdir -p "${@: -1}" && cp -r launch slurm recipes ds_configs "${@: -1}" ;;
      job-begins) echo "begins $*" >>"$RUN_DIR/asked"; echo "$BEGINS" ;;
      job-ended)
        [[ $ENDED && $LARGEBATCH_NODE != "${DAMAGED:-}" ]] || exit 1
        echo "ended $*" >>"$RUN_DIR/asked"; echo a word of something else; echo "$ENDED" ;;
      preflight)
        cat "$LARGEBATCH_LOGS/preflight/token" >"$RUN_DIR/token"
        printf '%s\\n' "$@" >"$RUN_DIR/preflight"
        for name in $BAD_NODES; do
          [[ ,$LARGEBATCH_NODE_NAMES, == *,$name,* ]] || continue
          echo "${NAMED:-$name}" >"$LARGEBATCH_LOGS/preflight/bad_nodes"
          exit 3
        done
        exit "$PREFLIGHT_CODE" ;;
    esac""",
    "accelerate": ACCELERATE,
    "apptainer": """
      printf '%s ' "$@" >"$RUN_DIR/apptainer"
      while [[ $1 != *.sif ]]; do shift; done
      shift
      exec "$@" """,
}
# The environment of a job, and what the commands say in it.
USUAL = """
  HOME=/ SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1 SLURM_JOB_PARTITION=main
  HOSTS=n1 STATE=RUNNING END=N/A SHOWN= BAD_NODES= BEGINS=go
  SQUEUE_CODE=0 SCONTROL_CODE=0 SBATCH_CODE=0 PREFLIGHT_CODE=0 TRAIN_CODE=0
"""
REQUEUED = "scontrol requeue 5"


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture
def start(run_dir, tmp_path, checkout):
    """One start of a job: its exit code, its log, and the environment that was trained in."""
    path = write_commands(tmp_path / "bin", COMMANDS)
    (tmp_path / "node").write_text("[[ $# == 0 ]] || exit 9\necho activated\n[[ -d /nowhere ]] && export X=1\n")
    usual = dict(setting.split("=") for setting in USUAL.split())
    paths = {"PATH": path, "RUN_DIR": str(run_dir), "LARGEBATCH_ENV": str(tmp_path / "node")}
    run_dir.mkdir()

    def run(*words, **changes):
        environment = {**usual, "ENDED": "leave 0 finished", **paths, **changes}
        code, log = run_bash("slurm/gpt_pydoc.sbatch", *words, cwd=checkout, environment=environment)
        return code, log, environment_in(run_dir)

    return run


@pytest.fixture
def written(run_dir):
    """The words in a file that a played command wrote, with a space behind each."""
    return lambda name: (run_dir / name).read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"ENDED": 'leave 75 failed: it\'s "$(id)" `id` ; *'}, 75, '] failed: it\'s "$(id)" `id` ; *\n'),
        ({"ENDED": "what?"}, 1, 'largebatch printed "what?"'),
        ({"ENDED": ""}, 1, "error: the start ended with code 0, and largebatch job-ended failed; submit"),
        ({"ENDED": "", "STATE": "COMPLETING"}, 1, "] Slurm is ending this start; submit the job again to resume"),
        ({"BEGINS": "leave 1 error: giving up"}, 1, "] error: giving up"),
        ({"PREFLIGHT_CODE": "2"}, 2, "training was not started"),
        ({"PREFLIGHT_CODE": "3", "BAD_NODES": "n1"}, 3, "training was not started"),
        ({"LARGEBATCH_ENV": "/nope"}, 2, "error: n1: LARGEBATCH_ENV=/nope: there is no such file"),
        ({"RUN_DIR": "s3://bucket/run"}, 2, "aws s3 sync"),
        ({"LARGEBATCH_SNAPSHOT": "/nope"}, 2, "LARGEBATCH_SNAPSHOT=/nope: there is no slurm/launch.sh in it"),
        ({"LARGEBATCH_NODES": "2"}, 2, "LARGEBATCH_NODES=2, but the job has 1 nodes"),
        ({"LARGEBATCH_PORTS": "9"}, 2, "LARGEBATCH_PORTS=9: not a range"),
        # The controller says that somebody is ending the job.
        ({"ENDED": "requeue stopped", "STATE": "COMPLETING"}, 1, "is ending this start"),
        ({"ENDED": "requeue stopped", "SCONTROL_CODE": "1"}, 1, "the job cannot be requeued"),
    ],
)
def test_it_ends(start, changes, code, words):
    returned, log, _ = start(**changes)
    assert (returned, REQUEUED in log) == (code, changes.get("SCONTROL_CODE") == "1"), log
    assert words in log


def test_a_controller_that_does_not_answer_is_no_reason_to_give_up(start, written):
    returned, log, _ = start(ENDED="requeue failed: reset by peer", TRAIN_CODE="1", SQUEUE_CODE="1")
    assert (returned, REQUEUED in log) == (0, True), log
    assert "] failed: reset by peer; requeued" in log
    assert "--exit-code 1 --max-restarts 3" in written("asked")


def test_a_task_of_an_array_trains_its_point_and_is_requeued_alone(start, tmp_path):
    """The first task has the number of the whole array; every word is kept as it is."""
    points = tmp_path / "sweep/points"
    points.mkdir(parents=True)
    (points / "0").write_text("no\n--seed=0\n")
    (points / "2").write_text('a=1_seed=3\n--data.x={"a b": "*"}\n--seed=3\n')
    (tmp_path / "sweep/a=1_seed=3").symlink_to(tmp_path / "run")
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "RUN_DIR": "elsewhere"}
    code, log, environment = start(f"--run-dir={tmp_path}/sweep", "--sweep", ENDED="requeue stopped", **array)
    assert (code, "scontrol requeue 5_2" in log) == (0, True), log
    assert environment["RUN_DIR"] == f"{tmp_path}/sweep/a=1_seed=3"
    assert (tmp_path / "run/words.n1").read_text().splitlines()[-2:] == ['--data.x={"a b": "*"}', "--seed=3"]
    assert (environment["LARGEBATCH_JOB_ID"], environment["LARGEBATCH_RESTART"]) == ("5", "0")


def test_commands_that_are_not_there(start, tmp_path):
    """What says so is one line, with node, command and file."""
    (tmp_path / "node").write_text("PATH=/usr/bin:/bin\n")
    returned, log, _ = start()
    assert returned == 127
    assert f"error: n1: largebatch is not found after {tmp_path / 'node'}; set LARGEBATCH_ENV" in log
    assert "error: largebatch cannot be run on n1" in log


def test_another_jobs_stop_file_stays(start, run_dir):
    for name in ("stop", "stop.4", "stop.5"):
        (run_dir / name).touch()
    assert start()[0] == 0
    assert sorted(path.name for path in run_dir.glob("stop*")) == ["stop", "stop.4"]


# --- nodes ------------------------------------------------------------------------------------------------------------

THREE = {"HOSTS": "n9 n10 n11", "SLURM_JOB_NUM_NODES": "3"}


def test_bad_nodes_are_replaced_by_spare_ones(start, written):
    returned, log, _ = start(**THREE, LARGEBATCH_NODES="2", BAD_NODES="n9")
    assert returned == 0, log
    assert "bad nodes: n9; trying again with n10 n11" in log
    for words in ("--num_machines 2 ", "--machine_rank 0 ", "--main_process_ip n10 "):
        assert words in written("words.n10")
    returned, log, _ = start(**THREE, LARGEBATCH_NODES="2", BAD_NODES="n9 n11")
    assert (returned, "trying again with n10 n11" in log) == (3, True)


def test_other_output_of_nodes_is_no_answer(start):
    """As of a container that greets, or of `srun --label`."""
    returned, log, _ = start(LABELED="1")
    assert returned == 0, log
    assert "] finished" in log


def test_largebatch_is_asked_again_on_another_node(start):
    returned, log, _ = start(**THREE, ENDED="requeue failed", DAMAGED="n9")
    assert (returned, REQUEUED in log) == (0, True), log


def test_nodes_that_are_not_the_jobs(start):
    """The pre-flight is not repeated for ever."""
    returned, log, _ = start(BAD_NODES="n1", NAMED="x7")
    assert returned == 3
    assert "the pre-flight named x7, which are not nodes of this job" in log


def test_a_job_is_submitted_again_without_bad_nodes(start, tmp_path):
    """Beside those that were excluded before, with the job's own options; not if none would be left."""
    shown = "Account=physics QOS=N/A TimeLimit=00:30:00 ExcNodeList=n7 Reservation=big Features=(null) Partition=gpu "
    shown += "TresPerNode=gres:gpu:h100:8 OverSubscribe=EXCLUSIVE StdOut=/user5/my logs/log-5 Power="
    job = {**THREE, "SHOWN": shown, "LARGEBATCH_EXCLUDE_BAD_NODES": "1", "SLURM_RESTART_COUNT": "2"}
    job |= {"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NAME": "my job"}
    returned, log, _ = start("--seed", "1", **job, BAD_NODES="n10")
    assert returned == 3, log
    # Slurm's count of restarts is not the new job's.
    (line,) = (line for line in log.splitlines() if line.startswith("sbatch  --"))
    for option in (
        "--export=ALL --dependency=afterany:5 --exclude=n10,n7 --job-name=my job --nodes=3 --account=physics "
        "--partition=gpu --reservation=big --time=00:30:00 --cpus-per-task=64 --gres=gpu:h100:8 --exclusive "
        "--output=/user5/my logs/log-%j ",
        f"script.sbatch --strategy=ddp --run-dir={tmp_path}/run --seed 1",
    ):
        assert option in line
    assert "bad nodes: n10; submitted again without them, as job 6" in log
    returned, log, _ = start("a b", **job, BAD_NODES="n10", SBATCH_CODE="1")
    assert returned == 3
    assert f"script.sbatch --strategy=ddp --run-dir={tmp_path}/run a\\ b\n" in log
    returned, log, _ = start(**job | {"HOSTS": "n1", "SLURM_JOB_NUM_NODES": "1"}, BAD_NODES="n1")
    assert (returned, "sbatch " in log) == (3, False)


def test_what_is_trained_in(start, written):
    _, log, trained_in = start(SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="9", END="2026-11-22T00:00:00", TZ="UTC")
    assert "on 1 nodes x 2 processes" in log
    assert trained_in["OMP_NUM_THREADS"] == "4"
    assert trained_in["LARGEBATCH_JOB_END_TIME"] == "1795305600"
    assert trained_in["SRUN_CPUS_PER_TASK"] == "9"
    assert "--gpus 2 " in written("preflight")
    assert written("token").strip() not in written("preflight")
    _, log, trained_in = start(SLURM_EXPORT_ENV="NONE")
    assert "on 1 nodes x 1 processes" in log
    assert trained_in["OMP_NUM_THREADS"] == "1"
    assert trained_in["LARGEBATCH_JOB_END_TIME"] == ""
    assert trained_in["SLURM_EXPORT_ENV"] == "ALL"
    assert "SRUN_CPUS_PER_TASK" not in trained_in


def test_gpus_that_slurm_does_not_manage(start, tmp_path, written):
    write_commands(tmp_path / "bin", {"nvidia-smi": r"printf 'GPU %s: x\n' 0 1 2 3"})
    assert start(LARGEBATCH_PROCESSES_PER_NODE="4")[0] == 0
    assert "--gpus 4 " in written("preflight")


# --- code, sites and containers ---------------------------------------------------------------------------------------


def test_later_starts_run_the_code_of_the_first(start, checkout, run_dir, written):
    assert start()[0] == 0
    for file in ("launch/node.sh", "launch/environment.sh"):
        (checkout / file).write_text("exit 99\n")
    # Its beginning finds the snapshot.
    launch = (checkout / "slurm/launch.sh").read_text()
    (checkout / "slurm/launch.sh").write_text(launch.replace("\n# --- what to run", "\nexit 99\n# --- what to run"))
    assert start(SLURM_RESTART_COUNT="1")[0] == 0
    code = run_dir / "jobs/5/code"
    task = f"{code}/recipes/causal_lm"
    assert f" {task}/train.py --config {task}/gpt_pydoc.json " in written("words.n1")
    assert f"--config_file {code}/recipes/accelerate_configs/ddp.yaml " in written("words.n1")
    start(SLURM_RESTART_COUNT="1", STRATEGY="zero2")
    assert f"--deepspeed_config_file {code}/ds_configs/zero2.json" in written("words.n1")
    # Another job takes its own, unless it is told which.
    assert start(SLURM_JOB_ID="6")[0] == 99
    assert start(SLURM_JOB_ID="6", LARGEBATCH_SNAPSHOT=str(code))[0] == 0


def test_a_site_profile(start, checkout, written, tmp_path):
    (checkout / "slurm/site.sh").write_text(
        "LARGEBATCH_SRUN_OPTIONS=(--mpi=none '--comment=two words')\n"
        f"export RUN_DIR=${{RUN_DIR:-{tmp_path}/run}}\n"
        "set -- not the job\n"
        "[[ -d /nowhere ]] && export X=1\n"
    )
    # Empty is not set. The job's words are not the profile's, nor the other way around.
    returned, log, _ = start("--seed", "1", RUN_DIR="")
    assert returned == 0, log
    assert written("words.n1").endswith(f" --run-dir {tmp_path}/run --seed 1 ")
    assert "--mpi=none --comment=two words --kill-on-bad-exit=1" in written("steps")


def test_containers(start, tmp_path, checkout):
    """No environment of the host inside, and all folders of the run."""
    run_dir = tmp_path / "scratch/run"
    run_dir.mkdir(parents=True)
    (tmp_path / "hub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    settings = {"RUN_DIR": str(tmp_path / "link/run"), "HF_HOME": str(tmp_path / "hub"), "SLURM_GPUS_ON_NODE": "1"}
    mounts = f"{checkout}:{checkout},{run_dir}:{run_dir},{tmp_path}/hub:{tmp_path}/hub"
    start(LARGEBATCH_CONTAINER="apptainer:x.sif", LARGEBATCH_CONTAINER_MOUNTS="/a:/b", **settings)
    words = (run_dir / "apptainer").read_text()
    assert words.startswith(f"exec --bind {mounts},/a:/b --pwd {checkout} --nv x.sif bash ")
    (run_dir / "jobs").rename(tmp_path / "old")
    start(LARGEBATCH_CONTAINER="apptainer:x.sif", LARGEBATCH_GPU_VENDOR="amd", **settings)
    assert "--rocm x.sif" in (run_dir / "apptainer").read_text()
    start(LARGEBATCH_CONTAINER="image.sqsh", NCCL_DEBUG="INFO", **settings)
    for step in (run_dir / "steps").read_text().splitlines()[-4:]:
        assert f"--container-name=largebatch_5 --container-workdir={checkout} --container-mounts={mounts}" in step
        assert "--no-container-mount-home" in step
        (carried,) = re.findall(r"--container-env=(\S+)", step)
        assert {*carried.split(",")} >= {"NCCL_DEBUG", "RUN_DIR", "LARGEBATCH_JOB_ID"}


def test_the_hosts_environment_stays_outside_of_containers(start, checkout, tmp_path):
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/activate").write_text("echo HOST >&2\n")
    # BASH_ENV is read before the script: it is not set to nothing, but unset.
    (tmp_path / "unset").write_text("unset LARGEBATCH_ENV BASH_ENV\n")
    unset = {"BASH_ENV": str(tmp_path / "unset")}
    code, log, trained_in = start(LARGEBATCH_CONTAINER="command:env INSIDE=1", **unset)
    assert (code, "HOST" in log, trained_in["INSIDE"]) == (0, False, "1")
    code, log, _ = start(**unset)
    assert (code, "HOST" in log) == (0, True)


# --- words ------------------------------------------------------------------------------------------------------------


def test_only_the_first_start_of_a_job_begins_where_it_was_told(start, tmp_path, written):
    """Otherwise, a job that starts over, or from a given checkpoint, would do so after each requeue."""
    kept = ("--seed", "1", "--allow-change", "seed")
    start("--resume", "none", *kept)
    assert written("words.n1").endswith(" --resume none --seed 1 --allow-change seed ")
    claim(tmp_path / "run/attempts", {"job_id": "5", "restart": 0})
    for words in (("--resume", "none"), ("--resume=none",)):
        start(*words, *kept, SLURM_RESTART_COUNT="1")
        assert written("words.n1").endswith(f" {tmp_path}/run --seed 1 --allow-change seed ")


@pytest.mark.parametrize("word", ["--strategy", "--strategy=", "--run-dir", "--run_dir", "--config=x", "--config"])
def test_words_that_are_refused(start, word):
    returned, log, _ = start(word)
    assert returned == 2
    assert f"error: {word.partition('=')[0]}: " in log


def test_strategy_and_run_folder_as_words(start, tmp_path, written):
    """They need no environment, which may not be carried to the job, and win over it."""
    run_dir = tmp_path / "run/inner"
    for words in (
        ("--strategy", "zero2", "--run-dir", str(run_dir), "--seed", "1"),
        ("--seed", "1", f"--run-dir={run_dir}", "--strategy=zero2"),
    ):
        code, log, _ = start(*words, STRATEGY="fsdp")
        assert code == 0, log
        assert "under zero2 on" in log
        assert "recipes/accelerate_configs/zero2.yaml " in written("inner/words.n1")
        assert written("inner/words.n1").endswith(f" --run-dir {run_dir} --seed 1 ")


@pytest.mark.parametrize(
    ("exported", "is_said"), [("NONE", True), ("RUN_DIR", True), ("ALL,RUN_DIR", False), ("ALL", False)]
)
def test_variables_that_were_not_carried(start, exported, is_said):
    _, log, _ = start(SLURM_EXPORT_ENV=exported)
    assert (f"] note: --export={exported}: other variables" in log.splitlines()[0]) is is_said


def test_outside_of_the_repository_and_of_slurm(tmp_path):
    for folder, words in ((tmp_path, "from the top of the repository"), (ROOT, "this is not a Slurm job")):
        code, log = run_bash(str(ROOT / "slurm/gpt_pydoc.sbatch"), cwd=folder, environment={"PATH": "/usr/bin:/bin"})
        assert (code, words in log) == (2, True), log
