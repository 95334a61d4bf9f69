"""The strategies of a project's Accelerate configs, as memory and traffic are counted for them."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from largebatch.backend.launch import read_launch
from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.plan.model_shape import Strategy, ZeroSettings
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.verify.launch import find_accelerate_configs, launch_environment

# With any other value of these settings of "zero_optimization", the counts of memory or traffic would be wrong.
COUNTED_AT = {
    "offload_optimizer": None,
    "offload_param": None,
    "zero_hpz_partition_size": 1,
    "round_robin_gradients": False,
    "contiguous_gradients": True,
    "reduce_scatter": True,
}


def find_strategies(
    recipe: Path, folder: Path | None, config: RecipeConfig
) -> tuple[list[Strategy], Mapping[str, str]]:
    """The strategies as a run would be launched with them, and why others are not counted.

    Args:
        recipe: The recipe's JSON file.
        folder: The folder of Accelerate configs; None means that of the recipe's own project.
        config: The recipe.

    Raises:
        UserError: There are no Accelerate configs.
    """
    found: list[Strategy] = []
    refusals = {name: entry.refusal(config.precision, config.optimizer.name) for name, entry in STRATEGIES.items()}
    left_out = {name: refusal.why for name, refusal in refusals.items() if refusal}
    for name, file in find_accelerate_configs(recipe, folder, None, config).items():
        environment = launch_environment(file, world_size=2)
        try:
            launch = read_launch({**os.environ, **environment}, config.precision, config.optimizer.name)
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
            settings = ZeroSettings.of(zero) if zero else None
            reshards = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
            found.append(Strategy(launch.strategy, settings, reshards))
    return found, left_out


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)
