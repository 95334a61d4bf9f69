"""`largebatch new`: a recipe copied into a folder that stands alone: the beginning of somebody's own repository."""

import argparse
import shlex
import sys
from pathlib import Path

from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "new",
        run,
        help="copy a recipe as the beginning of a repository of your own",
        description="Copy a recipe, and all that it runs with, into a new folder that stands alone: train.py, JSON, "
        "sbatch script, launch.sh, Accelerate and DeepSpeed configs, a test, requirements and a README that says what "
        "to change first. All commands work there. Nothing is overwritten.",
        epilog="""examples:
  largebatch new my_job --recipe gpt2_124m
  largebatch new my_job --recipe llama_8b --strategy fsdp
  largebatch new my_job --recipe resnet_digits --vendor
  largebatch new my_job --task my_task""",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to make")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", metavar="NAME", help="a shipped one, such as gpt2_124m")
    what.add_argument(
        "--task", metavar="NAME", help="the smallest complete task, on generated data, as the beginning of your own"
    )
    parser.add_argument(
        "--strategy", help="the one that its script and README begin with; default: the recipe's script's"
    )
    parser.add_argument(
        "--vendor", action="store_true", help="copy the package as well, instead of naming it in requirements.txt"
    )


def run(options: argparse.Namespace) -> int:
    """Make the folder, and print what can be done there at once."""
    from largebatch.tools.new.create import create_bundle
    from largebatch.tools.new.job import BundledJob

    folder: Path = options.folder
    if options.task:
        job = BundledJob.template(options.task, options.strategy)
    else:
        job = BundledJob.find(options.recipe, options.strategy)
    create_bundle(folder, job, options.vendor)
    count = sum(path.is_file() for path in folder.rglob("*"))
    print(f"{folder}: {count} files, {job.recipe} under {job.strategy}; README.md says what to change first")
    print(f"\n  cd {shlex.quote(str(folder))}")
    environment = ""
    if options.vendor:
        # Else the package of this environment would go on being used.
        print("  python3 -m venv .venv && . .venv/bin/activate")
        print("  pip install -r requirements.txt && pip install --no-deps --editable .")
    elif (activate := Path(sys.prefix, "bin", "activate")).is_file():
        environment = f"LARGEBATCH_ENV={shlex.quote(str(activate))} "
    print("  largebatch lint")
    print(f"  {job.launch()}")
    print(f"  {environment}sbatch {job.script}")
    return 0
