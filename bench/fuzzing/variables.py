"""Variables: the environment of a job's processes, its batch script and its pre-flight."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzzing.cases import Case
from fuzzing.mutations import TEXTS
from largebatch.backend.launch import read_launch
from largebatch.run.command_line import user_errors
from largebatch.run.record.folder import OwnFolder
from largebatch.run.watch.stop import StopRequests
from largebatch.storage.attempts import job_start
from largebatch.system.endings import OwnEnding
from largebatch.system.variables import whole_number_or_none

VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "false",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero2.json",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    "FSDP_VERSION": "2",
    "LARGEBATCH_SHARD_SIZE": "4",
    "LARGEBATCH_JOB_ID": "17",
    "LARGEBATCH_RESTART": "1",
    "LARGEBATCH_BEGAN": "1795000000",
    "LARGEBATCH_JOB_END_TIME": "1795009999",
    "LARGEBATCH_LOGS": "run/jobs/17/start_1",
    "LARGEBATCH_NODES": "2-4",
    "LARGEBATCH_PROCESSES_PER_NODE": "4",
    "LARGEBATCH_ENV": "",
    "LARGEBATCH_PREFLIGHT": "on",
    "LARGEBATCH_PREFLIGHT_SECONDS": "1",
    "LARGEBATCH_MIN_BUSBW": "10",
    "STRATEGY": "ddp",
    "RUN_DIR": "run",
    "SBATCH_GPUS_PER_NODE": "4",
}


def launched(words: Sequence[str]) -> None:
    """What each process of a job reads of its environment before it joins the others."""
    try:
        with user_errors(OwnEnding()):
            read_launch()
            folder = OwnFolder(Path(words[0]))
            folder.check_usable()
            folder.hold()
            StopRequests(folder.obeyed_stop_files, lambda number: lambda: number, 60.0).requested()
            job_start()
    except SystemExit:
        # The first process of a machine says why, for all of them.
        if not whole_number_or_none("LOCAL_RANK"):
            raise


def case(random: Random, folder: Path) -> Case:
    """Values that no launcher gives."""
    given = {name: value for name, value in VARIABLES.items() if random.random() < 0.6}
    for name in random.sample(sorted(VARIABLES), random.randint(1, 3)):
        given[name] = random.choice(TEXTS).replace("\0", "")
    start = ["--run-dir", "run", "--start", "1", "--max-restarts", "3"]
    lines = [["job-begins", *start], ["job-ended", *start, "--exit-code", "1"]]
    lines += [["submit", "gpt_pydoc", "--nodes", "2"], ["checkpoints", "run"]]
    if random.random() < 0.5:
        return Case(["run"], folder, launched, given)
    return Case(random.choice(lines), folder, environment=given)
