"""Stands in for `accelerate launch` and a training with one process per node, so that a job needs no torch.

The first node's process leaves in the run folder what launch.sh, `largebatch job-ended` and the tests look at. It takes
100 steps a second, and resumes after the last one that it has logged. The other nodes' processes follow it.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from largebatch.storage.attempts import claim, job_start
from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding, StopReason
from largebatch.system.failures import Kind

MARGIN_SECONDS = 170
"""How long before the end of the job's time the training stops."""
SECONDS_PER_STEP = 0.01
HELD_AT = 50
"""The step after which it waits for the file of `--hold`, if it is given that."""


def program(words=""):
    """The bash script that plays `accelerate`; it may add words to those of the recipe."""
    return (
        'rank="$* "; rank=${rank#*--machine_rank }; '
        f'RANK=${{rank%% *}} exec {sys.executable} {Path(__file__)} "$@" {words}'
    )


def train(run_dir, last_step, hold):
    """Take steps until the last one, or a request to stop; the exit code."""
    job = job_start()
    attempt = claim(run_dir / "attempts", {})
    requests: list[StopReason] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        reason = StopReason[number.name]
        signal.signal(number, lambda *_, reason=reason: requests.append(reason))
    stop_files = {
        run_dir / "stop": StopReason.STOP_FILE,
        run_dir / f"stop.{job['job_id']}": StopReason.BATCH_SCRIPT,
    }
    # Nodes that are not started by Slurm have no time limit.
    stop_at = float(os.environ.get("LARGEBATCH_JOB_END_TIME") or math.inf) - MARGIN_SECONDS
    lines = read_json_lines(run_dir / "metrics.jsonl")
    step = lines[-1]["step"] if lines else 0

    ending = OwnEnding()
    ending.begin(attempt.endings_dir, lambda: {"step": step}, lambda _: None)
    with (run_dir / "metrics.jsonl").open("a", buffering=1) as metrics:
        while step < last_step and not requests:
            time.sleep(SECONDS_PER_STEP)
            attempt.check()
            if step != HELD_AT or hold is None or hold.exists():
                step += 1
                metrics.write(json.dumps({"step": step}) + "\n")
            requests += [reason for file, reason in stop_files.items() if file.exists()]
            if time.time() >= stop_at:
                requests.append(StopReason.TIME_LIMIT)
    attempt.check()
    if requests:
        reason = requests[0]
        ending.write(Kind.STOPPED, f"by {reason}, after step {step}", reason=reason)
    else:
        ending.write(Kind.FINISHED, "")
    (run_dir / "stop").unlink(missing_ok=True)
    return 1 if requests else 0


def follow(run_dir):
    """Wait, whatever the signals, until the first node's process has ended this start, or is in a later one."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    job = job_start()
    run = RunFolder(run_dir)
    while True:
        latest = (run.attempts() or [{}])[-1]
        is_newer = latest.get("job_id") == job["job_id"] and latest["restart"] > job["restart"]
        ending = run.ending() if is_newer or latest.items() >= job.items() else None
        if is_newer or ending is not None:
            return 0 if ending is not None and ending.kind == Kind.FINISHED else 1
        time.sleep(0.1)


def main():
    options = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    print(f"stand-in on {os.environ['LARGEBATCH_NODE']}, rank {os.environ['RANK']}", flush=True)
    if os.environ["RANK"] != "0":
        return follow(run_dir)
    hold = Path(options["--hold"]) if "--hold" in options else None
    return train(run_dir, float(options.get("--train.stop_after_steps", "inf")), hold)


if __name__ == "__main__":
    sys.exit(main())
