"""`largebatch job-begins`: whether a start of a job should train."""

import argparse

from largebatch.tools.job.decision import FAILED
from largebatch.tools.job.starts import JobStarts, add_start

EPILOG = "slurm/launch.sh runs it before each start."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_start(parser)


def run(options: argparse.Namespace) -> int:
    """Print `go`, and note the checkpoint at which this start of the job LARGEBATCH_JOB_ID begins; or `leave CODE
    MESSAGE`, if the allowed number of starts has ended without a newer checkpoint.
    """
    starts = JobStarts(options)
    if reason := starts.reason_to_give_up():
        print(f"leave {FAILED} error: {reason}")
    else:
        starts.begin()
        print("go")
    return 0
