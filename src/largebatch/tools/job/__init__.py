"""`largebatch job-begins` and `job-ended`: what a batch script asks before and after each start of its job.

The first answers whether the start should train, and the second whether the job should be started again.
"""

import argparse
from pathlib import Path

from largebatch.tools.job.decision import FAILED, next_start
from largebatch.tools.job.starts import JobStarts
from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    begins = add_command(
        commands,
        "job-begins",
        run_before,
        epilog="slurm/launch.sh runs it before each start.",
    )
    ended = add_command(
        commands,
        "job-ended",
        run_after,
        epilog="slurm/launch.sh runs it after each start.",
    )
    for parser in (begins, ended):
        parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
        restarted = "how many times the job was restarted before"
        parser.add_argument("--start", type=int, required=True, help=restarted)
        allowed = "how many restarts are allowed at the same checkpoint"
        parser.add_argument("--max-restarts", type=int, required=True, help=allowed)
    ended.add_argument("--exit-code", type=int, required=True, help="the launcher's exit code")
    ended.add_argument("--asked-to-stop", default="", metavar="WHY", help="who asked the batch script to stop")


def run_before(options: argparse.Namespace) -> int:
    """Print `go`, and note the checkpoint at which this start of the job LARGEBATCH_JOB_ID begins; or `leave CODE
    MESSAGE`, if the allowed number of starts has ended without a newer checkpoint.
    """
    starts = JobStarts(options.run_dir, options.start, options.max_restarts)
    if reason := starts.reason_to_give_up():
        print(f"leave {FAILED} error: {reason}")
    else:
        starts.begin()
        print("go")
    return 0


def run_after(options: argparse.Namespace) -> int:
    """Print `requeue MESSAGE` if the job LARGEBATCH_JOB_ID should be started again after this start, or `leave CODE
    MESSAGE` if it has finished, or would fail again. Record the ending in the folder of the start.
    """
    starts = JobStarts(options.run_dir, options.start, options.max_restarts)
    found = next_start(starts.evidence(options.exit_code, options.asked_to_stop))
    starts.end(found)
    if found.code is None:
        print(f"requeue {found.message}; resumes from step {starts.checkpoint_step}")
    else:
        print(f"leave {found.code} {found.message}")
    return 0
