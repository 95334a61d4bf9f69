"""`largebatch lint`: mistakes in the files of a job, found without a GPU, a cluster or torch."""

import argparse
from pathlib import Path

from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "lint",
        run,
        help="find mistakes in recipes, SLURM scripts and configs, before a job waits in the queue",
        description="Check recipes, sbatch scripts, Accelerate and DeepSpeed configs against each other, without a "
        "GPU, a cluster or torch. Each finding has its file and line, why it is wrong, what to write instead, and its "
        "rule's name. Exit code 1 if there are any.",
        epilog="""examples:
  largebatch lint
  largebatch lint slurm/gpt2_124m.sbatch""",
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILES",
        help="what to check, with what it names; default: the repository that is the current folder",
    )


def run(options: argparse.Namespace) -> int:
    """Print one finding per line; 1 if there are any."""
    from largebatch.errors import counted
    from largebatch.tools.lint.project import lint_files, lint_repository

    report = lint_files(options.files) if options.files else lint_repository()
    for finding in report.findings:
        print(finding)
    print(f"{counted(report.files, 'file')}, {len(report.findings) or 'nothing'} found")
    return 1 if report.findings else 0
