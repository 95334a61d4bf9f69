"""`largebatch new`: copies a recipe into a self-contained folder, to start a repository of your own."""

import argparse
import shlex
import sys
from pathlib import Path

from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "new",
        run,
        description="Copy a recipe, and everything it needs to run, into a new self-contained folder: train.py, JSON, "
        "sbatch script, launch.sh, Accelerate and DeepSpeed configs, a test, requirements and a README that says what "
        "to change first. All commands work there. Nothing is overwritten.",
        epilog="""examples:
  largebatch new my_job --recipe gpt2_124m
  largebatch new my_job --recipe llama_8b --strategy fsdp
  largebatch new my_job --recipe resnet_digits --vendor
  largebatch new my_job --task my_task""",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to create")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", metavar="NAME", help="a shipped recipe, such as gpt2_124m")
    what.add_argument(
        "--task", metavar="NAME", help="the smallest complete task, on generated data, to start your own from"
    )
    parser.add_argument(
        "--strategy", help="the one that its script and README start with; default: that of the recipe's script"
    )
    parser.add_argument(
        "--vendor", action="store_true", help="copy the package as well, instead of naming it in requirements.txt"
    )


def run(options: argparse.Namespace) -> int:
    """Create the folder, and print what to run there first."""
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
        # Otherwise this environment's package would still be used.
        print("  python3 -m venv .venv && . .venv/bin/activate")
        print("  pip install -r requirements.txt && pip install --no-deps --editable .")
    elif (activate := Path(sys.prefix, "bin", "activate")).is_file():
        environment = f"LARGEBATCH_ENV={shlex.quote(str(activate))} "
    print("  largebatch lint")
    print(f"  {job.launch()}")
    print(f"  {environment}sbatch {job.script}")
    return 0
