"""`largebatch verify`: check on one machine that a recipe trains the same however it is launched."""

import argparse

from largebatch.tools.options import add_recipe, positive_int, positive_ints, words

EPILOG = """examples:
  largebatch verify RECIPE.json --world-sizes 2,4 --micro-batch-sizes 4,8
  largebatch verify RECIPE.json --tiny-data --world-sizes 2 --steps 5

Fields are overridden as in a run: --batch.global_batch_size 64."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--strategies", type=words, help="names of Accelerate configs; default: all that can train the recipe"
    )
    parser.add_argument("--world-sizes", type=positive_ints, default=[1, 2, 4], help="processes; default: 1,2,4")
    parser.add_argument(
        "--micro-batch-sizes",
        type=positive_ints,
        help="sizes to compare; default: the recipe's own and, without BatchNorm and dropout, half of it",
    )
    parser.add_argument(
        "--tiny-data",
        action="store_true",
        help="replace large data with the small data that the task declares, in batches of 32 samples",
    )
    parser.add_argument("--steps", type=positive_int, default=20, help="optimizer steps to train; default: 20")
    parser.add_argument(
        "--no-resume",
        action="store_false",
        dest="resume",
        help="do not also stop a run on one process halfway and resume it on several",
    )


def run(options: argparse.Namespace) -> int:
    """Train the first steps of a recipe under every combination of strategy, number of processes and micro-batch size,
    on GPUs if there are enough and otherwise in CPU processes, and compare loss, gradient norm, learning rate, weights
    and evaluation with one process. The exit code is 0 only if all agree.
    """
    from largebatch.tools.verify.table import verify

    return 0 if verify(options) else 1
