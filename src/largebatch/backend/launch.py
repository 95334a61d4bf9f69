"""What the launcher asked for, read from the environment before torch or a process group is touched."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from largebatch.backend.deepspeed_config import read_deepspeed_config
from largebatch.errors import LaunchError

# From <linux/prctl.h>.
PR_SET_PDEATHSIG = 1

Strategy = Literal["single", "ddp", "fsdp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Launch:
    """One process of a job, as its launcher describes it.

    Args:
        strategy: How the processes share the work.
        rank: This process, 0 to world_size - 1.
        world_size: Processes of the job.
        local_world_size: Processes on this machine.
        deepspeed_config: The checked DeepSpeed JSON, for the ZeRO strategies.
    """

    strategy: Strategy
    rank: int
    world_size: int
    local_world_size: int
    deepspeed_config: Mapping[str, Any] | None = None


def read_launch(environment: Mapping[str, str] = os.environ, precision: str = "fp32") -> Launch:
    """How this process was launched: by `accelerate launch`, torchrun, or alone.

    Args:
        environment: The process's environment variables.
        precision: The recipe's precision, which an Accelerate config must not contradict.

    Raises:
        LaunchError: The launch would silently train something else than the recipe says.
    """
    _refuse_use_cpu(environment)
    _refuse_tasks_that_do_not_know_of_each_other(environment)
    _refuse_what_is_not_supported(environment)
    _refuse_settings_of_the_recipe(environment, precision)
    rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        if precision == "fp64":
            raise LaunchError(
                "DeepSpeed ZeRO keeps its master weights in fp32, the recipe says precision fp64; launch with "
                "recipes/accelerate_configs/ddp.yaml or fsdp.yaml, or set precision fp32"
            )
        deepspeed_config = read_deepspeed_config(environment)
        strategy: Strategy = {1: "zero1", 2: "zero2", 3: "zero3"}[deepspeed_config["zero_optimization"]["stage"]]  # type: ignore[assignment]
        return Launch(strategy, rank, world_size, local_world_size, deepspeed_config)
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        version = environment.get("FSDP_VERSION", "1")
        if version != "2":
            raise LaunchError(
                f"the Accelerate config asks for FSDP version {version}; write fsdp_version: 2 (the first version "
                "keeps parameters in flat buffers, for which nothing here is checked)"
            )
        return Launch("fsdp", rank, world_size, local_world_size)
    return Launch("ddp" if "WORLD_SIZE" in environment else "single", rank, world_size, local_world_size)


def end_with_the_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Have the kernel end this process when its launcher dies, even by SIGKILL, which leaves workers orphaned."""
    if "TORCHELASTIC_RUN_ID" in environment and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# Settings of an Accelerate config that change the mathematics, or whose effect is not checked: variable, the values
# that leave it off, and why it is refused.
NOT_SUPPORTED = (
    (
        "FSDP_ACTIVATION_CHECKPOINTING",
        ("false",),
        "fsdp_activation_checkpointing: Accelerate recomputes with other dropout masks and moves BatchNorm twice",
    ),
    ("FSDP_OFFLOAD_PARAMS", ("false",), "fsdp_offload_params: not tested here"),
    (
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        ("false",),
        "fsdp_cpu_ram_efficient_loading: every process builds the same weights, and models with BatchNorm fail with it",
    ),
    ("FSDP_IGNORED_MODULES", ("", "none"), "fsdp_ignored_modules: their gradients would not be reduced"),
    ("ACCELERATE_DYNAMO_BACKEND", ("no",), "dynamo_config: not tested here"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", ("false",), "parallelism_config: processes are data-parallel only here"),
    ("ACCELERATE_USE_MEGATRON_LM", ("false",), "megatron_lm_config: not tested here"),
)


def _refuse_what_is_not_supported(environment: Mapping[str, str]) -> None:
    for variable, off, reason in NOT_SUPPORTED:
        value = environment.get(variable, off[0])
        if value.lower() not in off:
            raise LaunchError(f"the Accelerate config has {reason}; remove it (it is {value})")


def _refuse_tasks_that_do_not_know_of_each_other(environment: Mapping[str, str]) -> None:
    """N tasks started by srun or mpirun, without a launcher in between, would each train alone."""
    if "WORLD_SIZE" in environment:
        return
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(variable, "1") != "1":
            raise LaunchError(
                f"{environment[variable]} tasks were started ({variable}) without a launcher; each would train alone. "
                "Start one task a machine, and in it accelerate launch"
            )


def _refuse_use_cpu(environment: Mapping[str, str]) -> None:
    """`use_cpu: true` turns a job of N processes into N jobs of one, or into one process, without a word.

    With FSDP or DeepSpeed each process takes itself for the only one. With MULTI_CPU, Accelerate starts one process
    whatever `num_processes` says; it leaves the rendezvous address as the only trace that there should be more.
    """
    if _is_true(environment, "ACCELERATE_USE_CPU"):
        raise LaunchError(
            "the Accelerate config has use_cpu: true (or distributed_type: MULTI_CPU), with which the processes would "
            "each train alone; remove it and use one of recipes/accelerate_configs: without a GPU they run on the CPU "
            "as they are"
        )
    if "MASTER_ADDR" in environment and "ACCELERATE_USE_CPU" in environment and "WORLD_SIZE" not in environment:
        raise LaunchError(
            "the Accelerate config asks for several processes, but Accelerate started one (its distributed_type is "
            "neither MULTI_GPU, FSDP nor DEEPSPEED); use one of recipes/accelerate_configs"
        )


def _refuse_settings_of_the_recipe(environment: Mapping[str, str], precision: str) -> None:
    """Numbers of the optimisation that an Accelerate config could also set: they belong to the recipe alone."""
    launched_precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched_precision != "no" and launched_precision != precision:
        raise LaunchError(
            f"the Accelerate config has mixed_precision: {launched_precision}, the recipe precision {precision}; "
            f"remove it from the Accelerate config, or set precision in the recipe"
        )
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation not in ("1", "auto"):
        raise LaunchError(
            f"the Accelerate config has gradient_accumulation_steps: {accumulation}; remove it: it follows from the "
            "recipe's batch.global_batch_size and batch.micro_batch_size"
        )
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping not in ("auto", "none"):
        raise LaunchError(
            f"the Accelerate config has gradient_clipping: {clipping}; remove it and set optimizer.clip_norm in the "
            "recipe"
        )


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes")
