"""`largebatch job-ended`: whether a job should be started again after a start; run by the batch script."""

import argparse

from largebatch.tools.job.begins import add_options_of_a_start
from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "job-ended",
        run,
        help="say whether a job should be started again (slurm/launch.sh runs it)",
        description="Print `requeue MESSAGE` if the job LARGEBATCH_JOB_ID should be started again after this start, or "
        "`leave CODE MESSAGE` if it has finished, or would fail again. Record the ending in the folder of the start.",
        epilog="slurm/launch.sh runs it after each start.",
    )
    add_options_of_a_start(parser)
    parser.add_argument("--exit-code", type=int, required=True, help="the launcher's exit code")
    parser.add_argument("--asked-to-stop", default="", metavar="WHY", help="who asked the batch script to stop")


def run(options: argparse.Namespace) -> int:
    """Print the answer in one line."""
    import time

    from largebatch.tools.job.endings import decide
    from largebatch.tools.job.progress import Progress

    progress = Progress.of_this_job(options.run_dir, options.start, options.max_restarts)
    ending = decide(progress.evidence(options.exit_code, options.asked_to_stop), progress.reason_to_give_up())
    progress.end({"code": ending.code, "message": ending.message, **ending.about, "time": time.time()})
    if ending.code is None:
        print(f"requeue {ending.message}; resumes from step {progress.checkpoint_step}")
    else:
        print(f"leave {ending.code} {ending.message}")
    return 0
