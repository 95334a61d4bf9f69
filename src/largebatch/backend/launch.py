"""The launcher's settings, read from the environment before torch is imported, and which of them are refused."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from largebatch.backend.deepspeed_config import read_deepspeed_config
from largebatch.errors import LaunchError
from largebatch.plan.strategies import SINGLE, STRATEGIES, StrategyEntry, engine_of, find_strategy, is_true

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

# The values of distributed_type for which `accelerate launch` starts as many processes as it is asked for.
STARTS_PROCESSES = ("MULTI_GPU", "FSDP", "DEEPSPEED")
FSDP_VERSION = "2"
NOT_FSDP2 = "version 1 keeps parameters in flat buffers, which largebatch is not tested with"


class Setting(NamedTuple):
    """A setting of an Accelerate config that must be off, because the recipe decides it or its effect is not tested.

    Args:
        key: Its name in the YAML.
        variable: The environment variable that `accelerate launch` sets for it.
        off: The values that change nothing, in lowercase, beginning with the default.
        reason: Why any other value is refused.
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
        "Accelerate recomputes with different dropout masks and updates BatchNorm's statistics twice",
        "remove it and set compute.activation_checkpointing in the recipe",
    ),
    Setting("fsdp_offload_params", "FSDP_OFFLOAD_PARAMS", ("false",), "largebatch is not tested with it"),
    Setting(
        "fsdp_cpu_ram_efficient_loading",
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        ("false",),
        "every process builds the same weights, and models with BatchNorm fail with it",
    ),
    Setting("fsdp_ignored_modules", "FSDP_IGNORED_MODULES", ("", "none"), "their gradients would not be reduced"),
    Setting("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", ("no",), "largebatch is not tested with dynamo_config"),
    Setting(
        "parallelism_config",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        ("false",),
        "largebatch supports data parallelism only",
    ),
    Setting("megatron_lm_config", "ACCELERATE_USE_MEGATRON_LM", ("false",), "largebatch is not tested with it"),
)


@dataclass(frozen=True)
class Launch:
    """One process of a job, as its launcher describes it."""

    strategy: str
    """A name in the table of `plan.strategies`."""
    rank: int
    world_size: int
    local_world_size: int
    """Number of processes on this machine."""
    deepspeed_config: Mapping[str, Any] | None = None
    """The checked DeepSpeed JSON, for the ZeRO strategies."""

    @property
    def entry(self) -> StrategyEntry:
        return find_strategy(self.strategy)


def read_launch(
    environment: Mapping[str, str] = os.environ, precision: str = "fp32", optimizer: str | None = None
) -> Launch:
    """How this process was launched: by `accelerate launch`, by torchrun, or alone.

    Args:
        environment: The process's environment variables.
        precision: The recipe's precision, which an Accelerate config must not contradict.
        optimizer: The name of the recipe's optimizer, which the strategy must support; None means any.

    Raises:
        LaunchError: The launch would silently train something other than the recipe, or cannot train it.
    """
    _refuse_use_cpu(environment)
    _refuse_tasks_without_a_launcher(environment)
    _refuse_settings(environment, precision)
    rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
    engine = engine_of(environment)
    version = environment.get("FSDP_VERSION", "1")
    if engine == "FSDP" and version != FSDP_VERSION:
        raise LaunchError(
            f"the Accelerate config asks for FSDP version {version}; write fsdp_version: {FSDP_VERSION} ({NOT_FSDP2})"
        )
    deepspeed_config = read_deepspeed_config(environment) if engine == "DeepSpeed" else None
    stage = deepspeed_config["zero_optimization"]["stage"] if deepspeed_config else None
    entry = next(entry for entry in (SINGLE, *STRATEGIES.values()) if entry.launched(environment, stage))
    refusal = entry.refusal(precision, optimizer)
    if refusal:
        raise LaunchError("; ".join(refusal))
    return Launch(entry.name, rank, world_size, local_world_size, deepspeed_config)


def end_with_the_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Have the kernel end this process when its launcher dies, even by SIGKILL, which would leave it orphaned."""
    if "TORCHELASTIC_RUN_ID" in environment and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _refuse_settings(environment: Mapping[str, str], precision: str) -> None:
    launched_precision = environment.get(PRECISION.variable, "no")
    if launched_precision not in ("no", precision):
        raise LaunchError(
            f"the Accelerate config has mixed_precision: {launched_precision}, the recipe has precision {precision}; "
            "remove it from the Accelerate config, or set precision in the recipe"
        )
    for setting in REFUSED:
        value = environment.get(setting.variable, setting.off[0])
        if value.lower() not in setting.off:
            raise LaunchError(f"the Accelerate config has {setting.key}: {value}; {setting.remedy}: {setting.reason}")


def _refuse_tasks_without_a_launcher(environment: Mapping[str, str]) -> None:
    """Refuse several tasks that srun or mpirun started directly, because each would train alone."""
    if "WORLD_SIZE" in environment:
        return
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(variable, "1") != "1":
            raise LaunchError(
                f"{environment[variable]} tasks were started ({variable}) without a launcher; each would train alone. "
                "Start one task per machine, and run accelerate launch in it"
            )


def _refuse_use_cpu(environment: Mapping[str, str]) -> None:
    """Refuse `use_cpu: true`, which silently turns a job of N processes into N jobs of one, or into one process.

    With FSDP or DeepSpeed each process believes that it is alone. With MULTI_CPU, Accelerate starts one process,
    whatever `num_processes` says; only the rendezvous address shows that there should be more.
    """
    if is_true(environment, "ACCELERATE_USE_CPU"):
        raise LaunchError(
            "the Accelerate config has use_cpu: true (or distributed_type: MULTI_CPU), with which each process would "
            "train alone; remove it and use one of recipes/accelerate_configs, which run on the CPU when there is no "
            "GPU"
        )
    if "MASTER_ADDR" in environment and "ACCELERATE_USE_CPU" in environment and "WORLD_SIZE" not in environment:
        raise LaunchError(
            "the Accelerate config asks for several processes, but Accelerate started one (its distributed_type is "
            "neither MULTI_GPU, FSDP nor DEEPSPEED); use one of recipes/accelerate_configs"
        )
