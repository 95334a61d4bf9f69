"""`largebatch job-ended`: whether a job should be started again."""

import argparse

from largebatch.tools.job.decision import next_start
from largebatch.tools.job.starts import JobStarts, add_start

EPILOG = "slurm/launch.sh runs it after each start."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_start(parser)
    parser.add_argument("--exit-code", type=int, required=True, help="the launcher's exit code")
    parser.add_argument("--asked-to-stop", default="", metavar="WHY", help="who asked the batch script to stop")


def run(options: argparse.Namespace) -> int:
    """Print `requeue MESSAGE` if the job LARGEBATCH_JOB_ID should be started again after this start, or `leave CODE
    MESSAGE` if it has finished, or would fail again. Record the ending in the folder of the start.
    """
    starts = JobStarts(options)
    found = next_start(starts.evidence(options.exit_code, options.asked_to_stop))
    starts.end(found)
    if found.code is None:
        print(f"requeue {found.message}; resumes from step {starts.checkpoint_step}")
    else:
        print(f"leave {found.code} {found.message}")
    return 0
