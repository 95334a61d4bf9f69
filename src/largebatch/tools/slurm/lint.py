"""`largebatch lint`: mistakes in the files of a job, found without a GPU, a cluster or torch."""

import argparse

from largebatch.tools.options import Commands, add_command, recipe_file


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "lint",
        run,
        description="Check recipes, batch scripts, Accelerate and DeepSpeed configs against each other, without a "
        "GPU, a cluster or torch. Each finding names the file and line, what is wrong, what to write instead, and "
        "the rule. Exit code 1 if there are any. Options of sbatch are not checked: submit --dry-run asks Slurm.",
        epilog="""examples:
  largebatch lint
  largebatch lint slurm/gpt2_124m.sbatch""",
    )
    parser.add_argument(
        "files",
        type=recipe_file,
        nargs="*",
        metavar="FILES",
        help="what to check, with the files that they name, or names of recipes; default: the repository in the "
        "current folder",
    )


def run(options: argparse.Namespace) -> int:
    """Print one finding per line; 1 if there are any."""
    from largebatch.errors import counted
    from largebatch.tools.slurm.checks import files_of_repository, lint_files

    files = options.files or files_of_repository()
    findings = lint_files(files)
    for finding in findings:
        print(finding)
    print(f"{counted(len(files), 'file')}, {len(findings) or 'nothing'} found")
    return 1 if findings else 0
