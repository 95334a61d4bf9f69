"""`largebatch plan`: what a recipe would do; or, for several numbers of processes, what each strategy needs."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from largebatch.errors import ConfigError
from largebatch.tools.options import (
    Commands,
    add_accelerate_configs,
    add_command,
    add_options_of_a_run,
    add_recipe,
    positive_int,
    positive_ints,
)
from largebatch.tools.plan.gpu_memory import KNOWN_GPUS, gpu_memory

if TYPE_CHECKING:
    from largebatch.config import RecipeConfig
    from largebatch.plan import RunPlan


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "plan",
        run,
        help="explain the plan of a recipe for a number of processes",
        description="Print what a recipe would do on a number of processes; needs no GPU, no data and no torch. For "
        "several numbers of processes, print what each strategy holds and sends, and which one to use.",
        epilog="""examples:
  largebatch plan RECIPE.json --world-size 256
  largebatch plan RECIPE.json --world-sizes 8,64,512 --gpu-memory h100-80gb

Fields are overridden as in a run: --batch.global_batch_size 512.""",
        takes_overrides=True,
    )
    add_recipe(parser)
    processes = parser.add_mutually_exclusive_group(required=True)
    processes.add_argument("--world-size", type=positive_int, help="data-parallel processes, one per GPU")
    processes.add_argument(
        "--world-sizes",
        type=positive_ints,
        help="several numbers, such as 8,64,512: print memory and traffic of every strategy side by side instead of "
        "the plan; builds the model without memory, which needs torch and takes about 10 seconds",
    )
    parser.add_argument(
        "--gpu-memory",
        type=gpu_memory,
        metavar="GIB",
        help=f"memory of a GPU, or its name ({', '.join(KNOWN_GPUS)}): print what should fit, and which strategy to "
        "use; with --world-sizes",
    )
    add_accelerate_configs(parser)
    add_options_of_a_run(parser)
    parser.add_argument("--json", action="store_true", help="print the resolved plan, or all numbers, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan, or the comparison."""
    from largebatch.config import load_config
    from largebatch.plan import explain, resolve

    if options.world_sizes:
        return _compare(options)
    if options.gpu_memory or options.accelerate_configs:
        options.refuse("--gpu-memory and --accelerate-configs require --world-sizes")
    plan = resolve(load_config(options.config, options.overrides), options.world_size)
    sys.stdout.write(plan.to_json() if options.json else explain(plan, options.config.stem) + "\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from largebatch.config import load_config

    config: RecipeConfig = load_config(options.config, options.overrides)
    plan = first_plan(config, options.world_sizes)

    # These import torch and what model.py imports, which takes seconds.
    from largebatch.backend.model_shape import shape_of
    from largebatch.tools.plan.comparison import compare
    from largebatch.tools.plan.recipe_model import activation_bytes, recipe_model
    from largebatch.tools.plan.strategies import find_strategies
    from largebatch.tools.plan.table import table

    strategies, left_out = find_strategies(options.config, options.accelerate_configs, config)
    model, example_batch = recipe_model(config, options.config)
    shape = shape_of(model, plan)
    activations = activation_bytes(model, config, example_batch)
    comparison = compare(
        options.config.stem, config, shape, strategies, options.world_sizes, activations, options.gpu_memory, left_out
    )
    sys.stdout.write(json.dumps(comparison, indent=2) + "\n" if options.json else table(comparison, config))
    return 0


def first_plan(
    config: "RecipeConfig", world_sizes: Sequence[int], micro_batch_sizes: Sequence[int | None] = (None,)
) -> "RunPlan":
    """The first plan of these numbers of processes and micro-batch sizes, where None means the recipe's own.

    Raises:
        ConfigError: The batch divides over none of them.
    """
    from largebatch.plan import resolve

    problems: list[str] = []
    for world_size in world_sizes:
        for micro_batch_size in micro_batch_sizes:
            try:
                return resolve(config, world_size, micro_batch_size)
            except ConfigError as error:
                problems += [f"--world-sizes {world_size}: {problem}" for problem in error.problems]
    raise ConfigError(list(dict.fromkeys(problems)))
