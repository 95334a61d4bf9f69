"""The Accelerate YAML: which settings are refused, because they are the recipe's or their effect is not checked.

A launch is checked by the environment that `accelerate launch` made of the file, `largebatch lint` by the file itself.
"""

from dataclasses import dataclass

# The values of distributed_type with which `accelerate launch` starts as many processes as it is asked for.
STARTS_PROCESSES = ("MULTI_GPU", "FSDP", "DEEPSPEED")
FSDP_VERSION = "2"
NOT_FSDP2 = "the first version keeps parameters in flat buffers, for which nothing here is checked"


@dataclass(frozen=True)
class Setting:
    """A setting that may only be left off.

    Args:
        key: Its name in the YAML.
        variable: The environment variable that `accelerate launch` makes of it.
        off: The values that change nothing, in lower case; the first is what it is when left out.
        reason: Why any other is refused.
        remedy: What to write instead.
    """

    key: str
    variable: str
    off: tuple[str, ...]
    reason: str
    remedy: str = "remove it"


PRECISION = Setting("mixed_precision", "ACCELERATE_MIXED_PRECISION", ("no",), "it is the recipe's precision")
REFUSED = (
    Setting(
        "gradient_accumulation_steps",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ("1", "auto"),
        "it follows from the recipe's batch.global_batch_size and batch.micro_batch_size",
    ),
    Setting(
        "gradient_clipping",
        "ACCELERATE_GRADIENT_CLIPPING",
        ("auto", "none"),
        "it is the recipe's optimizer.clip_norm",
        "remove it and set optimizer.clip_norm in the recipe",
    ),
    Setting(
        "fsdp_activation_checkpointing",
        "FSDP_ACTIVATION_CHECKPOINTING",
        ("false",),
        "Accelerate recomputes with other dropout masks and moves BatchNorm twice",
        "remove it and set compute.activation_checkpointing in the recipe",
    ),
    Setting("fsdp_offload_params", "FSDP_OFFLOAD_PARAMS", ("false",), "it is not tested here"),
    Setting(
        "fsdp_cpu_ram_efficient_loading",
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        ("false",),
        "every process builds the same weights, and models with BatchNorm fail with it",
    ),
    Setting("fsdp_ignored_modules", "FSDP_IGNORED_MODULES", ("", "none"), "their gradients would not be reduced"),
    Setting("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", ("no",), "dynamo_config is not tested here"),
    Setting(
        "parallelism_config",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        ("false",),
        "processes are data-parallel only here",
    ),
    Setting("megatron_lm_config", "ACCELERATE_USE_MEGATRON_LM", ("false",), "it is not tested here"),
)
