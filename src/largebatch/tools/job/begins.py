"""`largebatch job-begins`: whether a start of a job should train; run by the batch script."""

import argparse
from pathlib import Path

from largebatch.tools.options import Commands, add_command, whole_number


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "job-begins",
        run,
        help="say whether a start of a job should train (slurm/launch.sh runs it)",
        description="Print `go`, and note the checkpoint at which this start of the job LARGEBATCH_JOB_ID begins; or "
        "`leave CODE MESSAGE`, if the allowed number of starts has ended without a newer checkpoint.",
        epilog="slurm/launch.sh runs it before each start.",
    )
    add_options_of_a_start(parser)


def add_options_of_a_start(parser: argparse.ArgumentParser) -> None:
    """Add what tells one start of a job from the others."""
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--start", type=whole_number, required=True, help="how many times the job was restarted before")
    restarts = "how many restarts are allowed at the same checkpoint"
    parser.add_argument("--max-restarts", type=whole_number, required=True, help=restarts)


def run(options: argparse.Namespace) -> int:
    """Print the answer in one line."""
    from largebatch.tools.job.endings import FAILED
    from largebatch.tools.job.progress import Progress

    progress = Progress.of_this_job(options.run_dir, options.start, options.max_restarts)
    if reason := progress.reason_to_give_up():
        print(f"leave {FAILED} error: {reason}")
    else:
        progress.begin()
        print("go")
    return 0
