"""`largebatch submit`: a recipe's job, planned, checked and handed to sbatch. The script is not changed."""

import argparse
from pathlib import Path

from largebatch.tools.options import Commands, add_command, add_recipe


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "submit",
        run,
        description="Submit slurm/RECIPE.sbatch with sbatch: show the plan on that many nodes, check recipe, script "
        "and configs with the values given here, copy what the job runs to RUN_DIR/jobs, show the sbatch line, run it, "
        "and print job, log and how to follow it. SBATCH_* variables and slurm/site.sh count as they do for the job. "
        "Exit code 1 if a check fails; nothing is submitted then.",
        epilog="""examples:
  largebatch submit gpt2_124m --nodes 4 --gpus-per-node 8 --dry-run
  largebatch submit gpt2_124m --nodes 4 --gpus-per-node 8 --strategy zero3 --partition=gpu --optimizer.weight_decay 0

Fields of the recipe are overridden as in a run. All other options, written --name=value, go to sbatch.""",
        takes_overrides=True,
    )
    add_recipe(parser)
    parser.add_argument("--nodes", required=True, help="number of nodes, such as 4, or 2-4 for as many as are free")
    parser.add_argument("--gpus-per-node", help="default: the script's; without GPUs, one process per CPU")
    parser.add_argument("--strategy", help="the name of an Accelerate config; default: the script's")
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/RECIPE")
    parser.add_argument("--resume", help="passed on to the run")
    parser.add_argument("--allow-change", help="passed on to the run")
    parser.add_argument("--dry-run", action="store_true", help="show all this, and what Slurm says, but submit nothing")


def run(options: argparse.Namespace) -> int:
    """Show what is run, and run it; return 1 if a check fails."""
    from largebatch.tools.slurm.submission import submit

    return 0 if submit(options) else 1
