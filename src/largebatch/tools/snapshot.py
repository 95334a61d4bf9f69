"""`largebatch snapshot`: a copy of what a job runs, which later edits of the repository do not change."""

import argparse
from pathlib import Path

from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "snapshot",
        run,
        help="copy what a job runs, so that later edits do not change it",
        description="Copy recipes, their code, Accelerate and DeepSpeed configs, scripts, and the package if it is in "
        "the repository, from the current folder to a folder that is complete or absent. Its git.json names the "
        "commit. Data and runs are left out. A snapshot that is there already stays as it is.",
        epilog="""examples:
  largebatch snapshot --to snapshots/monday

submit takes one for each job, and slurm/launch.sh for each job that was submitted without it.""",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to create")


def run(options: argparse.Namespace) -> int:
    """Take the snapshot."""
    from largebatch.storage.source import take_snapshot

    take_snapshot(Path(), options.to)
    return 0
