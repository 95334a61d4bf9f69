"""What the launcher asked for, read from the environment before torch or a process group is touched."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from largebatch.backend.accelerate_config import FSDP_VERSION, NOT_FSDP2, PRECISION, REFUSED
from largebatch.backend.deepspeed_config import read_deepspeed_config
from largebatch.errors import LaunchError
from largebatch.plan.strategies import SINGLE, STRATEGIES, StrategyEntry, engine_of, find_strategy, is_true

# From <linux/prctl.h>.
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """One process of a job, as its launcher describes it.

    Args:
        strategy: How the processes share the work: a name in the table of `plan.strategies`.
        rank: This process, 0 to world_size - 1.
        world_size: Processes of the job.
        local_world_size: Processes on this machine.
        deepspeed_config: The checked DeepSpeed JSON, for the ZeRO strategies.
    """

    strategy: str
    rank: int
    world_size: int
    local_world_size: int
    deepspeed_config: Mapping[str, Any] | None = None

    @property
    def entry(self) -> StrategyEntry:
        """What there is to know of the strategy."""
        return find_strategy(self.strategy)


def read_launch(
    environment: Mapping[str, str] = os.environ, precision: str = "fp32", optimizer: str | None = None
) -> Launch:
    """How this process was launched: by `accelerate launch`, torchrun, or alone.

    Args:
        environment: The process's environment variables.
        precision: The recipe's precision, which an Accelerate config must not contradict.
        optimizer: The name of the recipe's optimizer, which the strategy must suit; None is any.

    Raises:
        LaunchError: The launch would silently train something else than the recipe says, or cannot train it.
    """
    _refuse_use_cpu(environment)
    _refuse_tasks_that_do_not_know_of_each_other(environment)
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
    """Have the kernel end this process when its launcher dies, even by SIGKILL, which leaves workers orphaned."""
    if "TORCHELASTIC_RUN_ID" in environment and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _refuse_settings(environment: Mapping[str, str], precision: str) -> None:
    """Settings of an Accelerate config that are the recipe's to make, or whose effect is not checked."""
    launched_precision = environment.get(PRECISION.variable, "no")
    if launched_precision not in ("no", precision):
        raise LaunchError(
            f"the Accelerate config has mixed_precision: {launched_precision}, the recipe precision {precision}; "
            f"remove it from the Accelerate config, or set precision in the recipe"
        )
    for setting in REFUSED:
        value = environment.get(setting.variable, setting.off[0])
        if value.lower() not in setting.off:
            raise LaunchError(f"the Accelerate config has {setting.key}: {value}; {setting.remedy}: {setting.reason}")


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
    if is_true(environment, "ACCELERATE_USE_CPU"):
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
