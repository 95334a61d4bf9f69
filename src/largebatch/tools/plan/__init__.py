"""`largebatch plan`: what a recipe would do; or, for several numbers of processes, what each strategy needs."""

import argparse
import json
import re
from collections.abc import Sequence

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError
from largebatch.estimate.comparison import Json, Workload, compare_strategies
from largebatch.estimate.table import table
from largebatch.plan import RunPlan, explain, notes_on, resolve
from largebatch.system.hardware import GIB, GPUS
from largebatch.tools.options import add_options_of_a_run, add_recipe, positive_float, positive_int, positive_ints

GPU_OF_NAME = {gpu.name: gpu for gpu in GPUS}


EPILOG = """examples:
  largebatch plan RECIPE.json --world-size 256
  largebatch plan RECIPE.json --world-sizes 8,64,512 --gpu-memory 80
  largebatch plan RECIPE.json --world-sizes 64,512 --gpu h100 --network 400G/gpu

Fields are overridden as in a run: --batch.global_batch_size 512."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    processes = parser.add_mutually_exclusive_group(required=True)
    processes.add_argument("--world-size", type=positive_int, help="data-parallel processes, one per GPU")
    processes.add_argument(
        "--world-sizes",
        type=positive_ints,
        help="several numbers, such as 8,64,512: compare the memory and traffic of all strategies; needs torch",
    )
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument(
        "--gpu-memory",
        type=positive_float,
        metavar="GIB",
        help="memory of a GPU; --world-sizes requires it, or --gpu and --network",
    )
    kind = f"kind of GPU ({', '.join(GPU_OF_NAME)}): also estimate the time of a step, and suggest the fastest strategy"
    gpus.add_argument("--gpu", choices=GPU_OF_NAME, metavar="NAME", help=f"{kind}; with --world-sizes and --network")
    parser.add_argument(
        "--network",
        type=network,
        metavar="SPEED",
        help="network between nodes: Gbit/s per direction and GPU, such as 400G/gpu; with --gpu",
    )
    parser.add_argument("--gpus-per-node", type=positive_int, default=8, help="GPUs per node; default: 8")
    parser.add_argument(
        "--critical-batch",
        type=positive_float,
        metavar="SAMPLES",
        help="the critical batch, in samples: note whether the batch is beyond it; with --world-size",
    )
    add_options_of_a_run(parser)
    parser.add_argument("--json", action="store_true", help="print the resolved plan, or all numbers, as JSON")


def network(text: str) -> float:
    """Return the bytes per second of a bandwidth such as "400G/gpu", in Gbit/s."""
    speed = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)G/gpu", text)
    if not speed or not float(speed[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a network bandwidth: write 400G/gpu")
    return float(speed[1]) * 1e9 / 8


def run(options: argparse.Namespace) -> int:
    """Print what a recipe would do on a number of processes; needs no GPU, no data and no torch. For several numbers of
    processes, print what each strategy holds and sends, whether that should fit into a GPU, and which one to use.
    """
    if options.world_sizes and options.critical_batch:
        options.refuse("--critical-batch requires --world-size")
    if options.world_size and (options.gpu_memory or options.gpu or options.network):
        options.refuse("--gpu-memory, --gpu and --network require --world-sizes")
    if bool(options.gpu) != bool(options.network):
        options.refuse("--gpu, such as h100, and --network, such as 400G/gpu, require each other; or give --gpu-memory")
    if options.world_sizes and not (options.gpu or options.gpu_memory):
        options.refuse("--world-sizes requires --gpu-memory, such as 80, or --gpu and --network")
    config = load_config(options.config, options.overrides, task=options.task)
    if options.world_sizes:
        comparison = _comparison(options, config)
        text = json.dumps(comparison, indent=2) if options.json else table(comparison, config)
    else:
        plan = resolve(config, options.world_size)
        notes = notes_on(config, plan, options.critical_batch)
        text = plan.to_json() if options.json else explain(plan, options.config.stem, notes=notes)
    print(text.rstrip("\n"))
    return 0


def first_plan(config: RecipeConfig, world_sizes: Sequence[int], micro_batch_sizes: Sequence[int | None]) -> RunPlan:
    """The first plan of these numbers of processes and micro-batch sizes, which are as in `resolve`.

    Raises:
        ConfigError: The batch divides over none of them.
    """
    problems: list[str] = []
    for world_size in world_sizes:
        for micro_batch_size in micro_batch_sizes:
            try:
                return resolve(config, world_size, micro_batch_size)
            except ConfigError as error:
                problems += [f"--world-sizes {world_size}: {problem}" for problem in error.problems]
    raise ConfigError(list(dict.fromkeys(problems)))


def _comparison(options: argparse.Namespace, given: RecipeConfig, at_most: int | None = None) -> Json:
    """Return the comparison of strategies on `options.world_sizes`.

    A micro-batch size "auto" is estimated: the largest, up to `at_most`, with which each of them has a strategy that
    should fit.

    Raises:
        UserError: The batch divides over none of the world sizes, or the model or its optimizer cannot be used.
    """
    if options.gpu and given.precision == "fp64":
        options.refuse("--gpu estimates the time of bf16 and fp32, not of the recipe's fp64; give --gpu-memory")
    plan = first_plan(given, sorted(options.world_sizes, reverse=True), [at_most])
    config = given.with_micro_batch_size(plan.micro_batch_size)

    # These import torch and what model.py imports, which takes seconds.
    from largebatch.backend.fsdp_units import shape_of
    from largebatch.estimate.recipe_model import (
        NotEstimated,
        activation_bytes,
        micro_batch_flops,
        recipe_model,
    )
    from largebatch.estimate.step_time import Fabric, Hardware
    from largebatch.model.parts import convolves
    from largebatch.optim.trial import try_optimizer
    from largebatch.tools.plan.accelerate_configs import find_strategies

    try_optimizer(plan)
    strategies, not_counted = find_strategies(config, options.gpus_per_node)
    model = recipe_model(config)
    shape = shape_of(model, plan)
    activations = flops = not_estimated = None
    try:
        activations = activation_bytes(model, config)
        if options.gpu:
            flops = micro_batch_flops(model, config)
    except NotEstimated as reason:
        not_estimated = str(reason)
    hardware = None
    if options.gpu_memory:
        memory = round(options.gpu_memory * GIB)
    else:
        gpu = GPU_OF_NAME[options.gpu]
        peak = gpu.peak_tflops(config.precision)
        assert peak is not None
        fabric = Fabric(options.gpus_per_node, gpu.link_gb_per_s * 1e9, options.network)
        memory_bandwidth = gpu.memory_gb_per_s * 1e9 if convolves(model) else None
        hardware = Hardware(peak * 1e12, gpu.bf16_tflops * 1e12, fabric, memory_bandwidth)
        memory = round(gpu.memory_gib * GIB)
    comparison = compare_strategies(
        options.config.stem,
        config,
        workload=Workload(shape, activations, flops, not_estimated),
        strategies=strategies,
        world_sizes=options.world_sizes,
        gpu_memory=memory,
        hardware=hardware,
        not_counted=not_counted,
    )
    fits = all(column["problem"] or column["suggested"] for column in comparison["world_sizes"])
    if given.batch.finds_micro_batch_size and plan.micro_batch_size > 1 and not fits:
        return _comparison(options, given, plan.micro_batch_size // 2)
    return comparison
