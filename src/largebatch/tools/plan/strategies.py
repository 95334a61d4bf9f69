"""The strategies of a project's Accelerate configs, with the settings that memory and traffic depend on."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from largebatch.backend.launch import read_launch, read_shard_size
from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.plan.model_shape import Strategy, ZeroSettings
from largebatch.plan.strategies import STRATEGIES, is_true
from largebatch.tools.verify.launch import find_accelerate_configs, launch_environment

# With any other value of these settings of "zero_optimization", the counts of memory or traffic would be wrong.
COUNTED_AT = {
    "offload_optimizer": None,
    "offload_param": None,
    "round_robin_gradients": False,
    "contiguous_gradients": True,
    "reduce_scatter": True,
}


def find_strategies(
    recipe: Path, folder: Path | None, config: RecipeConfig, gpus_per_node: int
) -> tuple[list[Strategy], Mapping[str, str]]:
    """Return the strategies as a run would be launched with them, and why others are not counted.

    Args:
        recipe: The recipe's JSON file.
        folder: The folder of Accelerate configs; None means that of the recipe's own project.
        config: The recipe.
        gpus_per_node: Processes that hsdp shards over, unless its Accelerate config or LARGEBATCH_SHARD_SIZE sets them.

    Raises:
        UserError: There are no Accelerate configs.
    """
    found: list[Strategy] = []
    refusals = {name: entry.refusal_of(config) for name, entry in STRATEGIES.items()}
    left_out = {name: refusal.why for name, refusal in refusals.items() if refusal}
    for name, file in find_accelerate_configs(recipe, folder, None, config).items():
        environment = {**os.environ, **launch_environment(file, world_size=gpus_per_node)}
        try:
            if is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
                # At least two replicas, whatever their size.
                environment["WORLD_SIZE"] = str(2 * gpus_per_node * read_shard_size(environment, gpus_per_node))
            launch = read_launch(environment, config.precision, config.optimizer_entry, config.compute.reduce_gradients)
        except UserError as error:
            left_out[name] = str(error)
            continue
        zero = launch.deepspeed_config["zero_optimization"] if launch.deepspeed_config else {}
        uncounted = [key for key, usual in COUNTED_AT.items() if zero.get(key, usual) != usual]
        # For example "auto", which Accelerate replaces with a value that depends on the model.
        uncounted += [key for key in ZeroSettings.__dataclass_fields__ if not _is_size(zero.get(key))]
        if uncounted:
            left_out[name] = f"its DeepSpeed JSON has zero_optimization.{uncounted[0]} {json.dumps(zero[uncounted[0]])}"
        elif environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP"):
            left_out[name] = "its Accelerate config has fsdp_transformer_layer_cls_to_wrap"
        else:
            found.append(launch.sharing)
    return found, left_out


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)
