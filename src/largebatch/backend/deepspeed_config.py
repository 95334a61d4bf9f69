"""The DeepSpeed JSON: which settings are the user's, which are the plan's, and how they are combined."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from largebatch.errors import LaunchError
from largebatch.estimate.model_shape import ZeroSettings
from largebatch.plan import RunPlan
from largebatch.system.regular_file import read_bytes
from largebatch.words import bulleted

# Keys that decide the optimization, and why they may not be in the DeepSpeed JSON.
FROM_THE_RECIPE = {
    "optimizer": "the recipe's optimizer section decides it",
    "scheduler": "the recipe's learning_rate section decides it",
    "train_batch_size": "it follows from the recipe's batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "it is the recipe's batch.micro_batch_size",
    "gradient_accumulation_steps": "it follows from the recipe's batch section and the number of processes",
    "gradient_clipping": "it is the recipe's optimizer.clip_norm",
    "bf16": "it follows from the recipe's precision",
    "fp16": "it follows from the recipe's precision",
    "torch_autocast": "it follows from the recipe's precision",
}
# Keys that are known to decide only memory, speed and logging. All others are refused.
MEMORY_AND_SPEED = {
    "zero_optimization",
    "zero_force_ds_cpu_optimizer",
    "aio",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "flops_profiler",
}
# The same in "zero_optimization": what estimates count with, and what changes no count.
ZERO_MEMORY_AND_SPEED = {
    *(field.name for field in fields(ZeroSettings)),
    "allgather_partitions",
    "allgather_bucket_size",
    "stage3_max_live_parameters",
    "stage3_gather_16bit_weights_on_model_save",
}


def read_deepspeed_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """The DeepSpeed JSON that the launched Accelerate config names.

    Raises:
        LaunchError: There is none, or it decides something that the recipe decides.
    """
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        raise LaunchError(
            "the Accelerate config asks for DeepSpeed without a deepspeed_config_file; write, for example, "
            "deepspeed_config_file: ds_configs/zero2.json"
        )
    try:
        config = json.loads(read_bytes(Path(path), follow_links=True).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(
            f"the DeepSpeed config {path!r} (relative to {Path.cwd()}) cannot be read: {error}; launch from the folder "
            "it is relative to, or write an absolute path in the Accelerate config"
        ) from None
    problems = deepspeed_config_problems(config)
    if problems:
        raise LaunchError(f"the DeepSpeed config {path} cannot be used:{bulleted(problems)}")
    assert isinstance(config, dict)
    return config


def deepspeed_config_problems(config: object) -> list[str]:
    """The settings of a parsed DeepSpeed JSON that might change the optimization, which only the recipe decides."""
    if not isinstance(config, dict):
        return ["it must be a JSON object, { … }"]
    problems = [
        f"{key}: remove it; {reason}" for key, reason in FROM_THE_RECIPE.items() if config.get(key, "auto") != "auto"
    ]
    given = config.get("zero_optimization")
    zero = given if isinstance(given, dict) else {}
    stage = zero.get("stage")
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        problems.append(f"zero_optimization.stage: given {json.dumps(stage)}; write 1, 2 or 3")
    unknown = [key for key in config if key not in MEMORY_AND_SPEED and key not in FROM_THE_RECIPE]
    unknown += [f"zero_optimization.{key}" for key in zero if key not in ZERO_MEMORY_AND_SPEED]
    problems += [
        f"zero_optimization.{key}.device: nvme is not supported: checkpoints do not include it; write cpu"
        for key in ("offload_optimizer", "offload_param")
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme"
    ]
    problems += [f"{key}: remove it; it is not known to affect only memory and speed" for key in unknown]
    return problems


def fill_from_plan(config: Mapping[str, Any], plan: RunPlan) -> dict[str, Any]:
    """The complete DeepSpeed config: the user's settings for memory and speed, and the plan's numbers.

    Accumulation is 1 inside DeepSpeed: the loss is already divided by the whole global batch, and the end of each
    accumulation is marked by hand, so only the plan decides the number of micro-batches.
    """
    filled = {key: value for key, value in config.items() if key not in FROM_THE_RECIPE}
    filled |= {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "train_batch_size": plan.micro_batch_size * plan.world_size,
        "gradient_accumulation_steps": 1,
        # 0.0 means no clipping; without the key DeepSpeed clips to 1.0.
        "gradient_clipping": plan.optimizer.clip_norm or 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        # It waits for the device before each micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    filled["zero_optimization"] = dict(config["zero_optimization"])
    if plan.precision == "bf16":
        # DeepSpeed's own bf16 mode would accumulate and reduce in bf16. With autocast, as under DDP, weights, gradients
        # and, because no module is named as safe in lower precision, their communication stay in fp32.
        filled["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return filled
