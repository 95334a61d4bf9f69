"""`largebatch sweep`: trains a recipe at all combinations of some values, and compares the results."""

import argparse
from pathlib import Path

from largebatch.storage.layout import read_object
from largebatch.tools.options import add_recipe, positive_int
from largebatch.tools.slurm.submit import task_and_words

EPILOG = """examples:
  largebatch sweep RECIPE.json --learning_rate.base_lr 1e-3,2e-3 --batch.global_batch_size 256,1024 --seeds 3
  largebatch sweep RECIPE.json --learning_rate.scaling '["linear", "sqrt"]' --slurm --nodes 2 --partition=gpu"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_points(parser, "runs/sweeps/RECIPE")


def add_points(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add the options of all commands that train points."""
    parser.add_argument("--seeds", type=positive_int, default=1, help="seeds of each point; default: 1")
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"folder of the runs; default: {folder}")
    parser.add_argument("--metric", default="loss", help="what the last evaluation is compared by; default: loss")
    parser.add_argument("--higher-is-better", action="store_true", help="of the metric, such as an accuracy")
    parser.add_argument("--max-parallel", type=positive_int, help="points that train at once; default here: 1")
    parser.add_argument("--num-processes", type=positive_int, default=1, help="processes of each run here; default: 1")
    parser.add_argument("--strategy", help="an Accelerate config; default: ddp for several processes, or the script's")
    parser.add_argument("--slurm", action="store_true", help="submit the points as one array; takes options of sbatch")
    parser.add_argument("--nodes", help="with --slurm: nodes of each point; default: the script's")
    parser.add_argument("--gpus-per-node", help="with --slurm; default: the script's")
    parser.set_defaults(resume=None, allow_change=None, dry_run=False)


def run(options: argparse.Namespace) -> int:
    """Train a recipe at all combinations of the values that are listed for its fields, with several seeds, here or as
    one Slurm array. Numbers are listed as 1e-3,2e-3, other values as a JSON list; a value that is itself a list is
    written [[…]]. All points are planned and checked first: if one is wrong, none starts. The same command continues a
    sweep, with more values or seeds if it lists them; `largebatch report` shows it.
    """
    from largebatch.tools.sweep.points import Sweep, grid
    from largebatch.tools.sweep.results import Results
    from largebatch.tools.sweep.start import start

    task, overrides, sbatch_options = task_and_words(options)
    recipe: Path = options.config
    content = read_object(recipe)
    points = grid(overrides, options.seeds, content.get("seed", 0))
    sweep = Sweep(str(recipe), content, points, options.metric, options.higher_is_better)
    folder = options.folder or Path("runs/sweeps", recipe.stem)
    code = start(sweep, folder, task, options, sbatch_options)
    if not (options.slurm and sweep.waiting(folder)):
        print(f"\n{Results.read(folder).table()}")
    return code
