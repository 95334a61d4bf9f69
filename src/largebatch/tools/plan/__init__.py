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
from largebatch.tools.plan.gpu_memory import GIB, gpu_memory
from largebatch.tools.plan.hardware import GPUS, NETWORKS, SHORT, gpu, network

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
  largebatch plan RECIPE.json --world-sizes 64,512 --gpu h100 --network 400G/gpu

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
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument(
        "--gpu-memory",
        type=gpu_memory,
        metavar="GIB",
        help=f"memory of a GPU, or its name ({', '.join(GPUS)}): print what should fit, and which strategy to use; "
        "with --world-sizes",
    )
    gpus.add_argument(
        "--gpu",
        type=gpu,
        metavar="NAME",
        help=f"kind of GPU ({', '.join([*GPUS, *SHORT])}): also estimate the time of a step, and suggest the fastest "
        "strategy that should fit; with --world-sizes and --network",
    )
    parser.add_argument(
        "--network",
        type=network,
        metavar="SPEED",
        help="what connects the nodes: Gbit/s and direction per GPU or node, such as 400G/gpu or 3200G/node, or one of "
        f"{', '.join(NETWORKS)}; with --gpu",
    )
    parser.add_argument("--gpus-per-node", type=positive_int, default=8, help="GPUs of a node; default: 8")
    add_accelerate_configs(parser)
    add_options_of_a_run(parser)
    parser.add_argument("--json", action="store_true", help="print the resolved plan, or all numbers, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan, or the comparison."""
    from largebatch.config import load_config
    from largebatch.plan import explain, resolve

    if options.world_sizes:
        return _compare(options)
    if options.gpu_memory or options.gpu or options.network or options.accelerate_configs:
        options.refuse("--gpu-memory, --gpu, --network and --accelerate-configs require --world-sizes")
    plan = resolve(load_config(options.config, options.overrides), options.world_size)
    sys.stdout.write(plan.to_json() if options.json else explain(plan, options.config.stem) + "\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from largebatch.config import load_config

    if options.network and not options.gpu:
        options.refuse(f"--network requires --gpu, the kind of GPU, such as h100; known: {', '.join([*GPUS, *SHORT])}")
    if options.gpu and not options.network:
        options.refuse(
            "--gpu requires --network, such as 400G/gpu, 3200G/node or ib-ndr; for what fits alone, give --gpu-memory"
        )
    config: RecipeConfig = load_config(options.config, options.overrides)
    if options.gpu and config.precision == "fp64":
        options.refuse(
            "--gpu estimates the time of bf16 and fp32, but the recipe has precision fp64; give --gpu-memory"
        )
    plan = first_plan(config, options.world_sizes)

    # These import torch and what model.py imports, which takes seconds.
    from largebatch.backend.model_shape import shape_of
    from largebatch.plan.step_time import Fabric, Hardware
    from largebatch.tools.plan.comparison import compare
    from largebatch.tools.plan.recipe_model import activation_bytes, micro_batch_flops, recipe_model
    from largebatch.tools.plan.strategies import find_strategies
    from largebatch.tools.plan.table import table

    strategies, left_out = find_strategies(options.config, options.accelerate_configs, config, options.gpus_per_node)
    model, example_batch = recipe_model(config, options.config)
    shape = shape_of(model, plan)
    activations = activation_bytes(model, config, example_batch)
    hardware, flops, memory = None, None, options.gpu_memory
    if options.gpu:
        peak = options.gpu.bf16 if config.precision == "bf16" else options.gpu.fp32
        share = options.network.of_a_gpu(options.gpus_per_node)
        hardware = Hardware(peak, Fabric(options.gpus_per_node, options.gpu.link, share))
        flops = None if activations is None else micro_batch_flops(model, config, example_batch)
        memory = round(options.gpu.memory_gib * GIB)
    comparison = compare(
        options.config.stem,
        config,
        shape,
        strategies,
        options.world_sizes,
        activations,
        memory,
        left_out,
        hardware,
        flops,
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
