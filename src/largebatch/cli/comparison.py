"""`largebatch plan --world-sizes`: what a recipe needs on several numbers of processes, under every strategy."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from largebatch.cli.colour import painter
from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError
from largebatch.plan import RunPlan, resolve
from largebatch.plan.comparison import compare
from largebatch.plan.comparison_table import table
from largebatch.plan.model_shape import Strategy, ZeroSettings

# Settings of "zero_optimization" with any other value than these, states or traffic are somewhere else.
COUNTED_AT = {
    "offload_optimizer": None,
    "offload_param": None,
    "zero_hpz_partition_size": 1,
    "round_robin_gradients": False,
    "contiguous_gradients": True,
    "reduce_scatter": True,
}


def print_comparison(
    path: Path,
    overrides: Sequence[str],
    world_sizes: Sequence[int],
    gpu_memory: int | None,
    script: Path | None,
    accelerate_configs: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print memory and traffic of a recipe under every strategy, on several numbers of processes.

    Args:
        path: The recipe.
        overrides: Of its fields.
        world_sizes: Numbers of processes.
        gpu_memory: Bytes of a GPU; None says nothing of what fits.
        script: The train.py that builds its model; None is the one beside it.
        accelerate_configs: Folder of the strategies' YAML files; None is the recipe's project's.
        as_json: Whether to print data.

    Raises:
        UserError: The model cannot be built, or the recipe be trained on none of the numbers of processes.
    """
    config: RecipeConfig = load_config(path, overrides)
    plan = _first_plan(config, world_sizes)
    strategies, left_out = _strategies(path, accelerate_configs, config.precision)

    # With torch and what the script imports, these take seconds.
    from largebatch.backend.model_shape import shape_of
    from largebatch.rehearsal.activations import activation_bytes
    from largebatch.rehearsal.recipe_model import recipe_model

    model = recipe_model(config, script or path.parent / "train.py")
    shape = shape_of(model, plan)
    activations = activation_bytes(model, config)
    comparison = compare(path.stem, config, shape, strategies, world_sizes, activations, gpu_memory, left_out)
    if as_json:
        sys.stdout.write(json.dumps(comparison.as_data(), indent=2) + "\n")
    else:
        sys.stdout.write(table(comparison, painter(sys.stdout)))


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)


def _first_plan(config: RecipeConfig, world_sizes: Sequence[int]) -> RunPlan:
    problems = []
    for world_size in world_sizes:
        try:
            return resolve(config, world_size)
        except ConfigError as error:
            problems += [f"--world-sizes {world_size}: {problem}" for problem in error.problems]
    raise ConfigError(problems)


def _strategies(path: Path, folder: Path | None, precision: str) -> tuple[list[Strategy], Mapping[str, str]]:
    """Those of the folder as a run would be launched with them, and why others are not counted."""
    from largebatch.backend.launch import read_launch
    from largebatch.rehearsal.launch import find_accelerate_configs, launch_environment

    found, left_out = [], {}
    for name, file in find_accelerate_configs(path, folder, None, precision).items():
        environment = launch_environment(file, world_size=2)
        try:
            launch = read_launch({**os.environ, **environment}, precision)
        except UserError as error:
            left_out[name] = str(error)
            continue
        zero = launch.deepspeed_config["zero_optimization"] if launch.deepspeed_config else None
        uncounted = [key for key, usual in COUNTED_AT.items() if zero and zero.get(key, usual) != usual]
        # "auto", say, which Accelerate replaces by something of the model.
        uncounted += [key for key in ZeroSettings.__dataclass_fields__ if zero and not _is_size(zero.get(key, 0))]
        if zero and uncounted:
            left_out[name] = f"its DeepSpeed JSON has zero_optimization.{uncounted[0]} {json.dumps(zero[uncounted[0]])}"
        elif environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP"):
            left_out[name] = "its Accelerate config has fsdp_transformer_layer_cls_to_wrap"
        else:
            settings = ZeroSettings.of(zero) if zero else None
            reshards = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
            found.append(Strategy(launch.strategy, settings, reshards))
    return found, left_out
