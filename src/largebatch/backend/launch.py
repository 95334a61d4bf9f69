"""The launcher's settings, read from the environment without torch, and which of them are refused."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from largebatch.backend.deepspeed_config import read_deepspeed_config
from largebatch.config import RecipeConfig
from largebatch.errors import LaunchError
from largebatch.estimate.model_shape import Strategy, ZeroSettings
from largebatch.plan.strategies import SINGLE, STRATEGIES, Engine, StrategyEntry, find_strategy
from largebatch.system.parent_process import end_with_parent
from largebatch.system.variables import whole_number

# The values of distributed_type for which `accelerate launch` starts as many processes as requested.
STARTS_PROCESSES = ("MULTI_GPU", "FSDP", "DEEPSPEED")
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # of torch's launcher, in seconds
SECONDS_TO_SAVE = 300  # that are enough for most runs
FSDP_VERSION = "2"
DATA_PARALLELISM = "largebatch supports data parallelism only"
NOT_FSDP2 = "version 1 keeps parameters in flat buffers, which largebatch is not tested with"


class Setting(NamedTuple):
    """A setting of an Accelerate config that must be off, because the recipe decides it or its effect is not tested."""

    key: str  # its name in the YAML
    off: tuple[str, ...]  # the values that change nothing, in lowercase, starting with the default
    why: str  # why any other value is refused, or what to write in the recipe instead
    variable_if_other: str = ""  # the environment variable, if its name does not follow from that in the YAML

    @property
    def variable(self) -> str:
        """The environment variable that `accelerate launch` sets for it."""
        prefix = "" if self.key.startswith(("fsdp_", "parallelism_config_")) else "ACCELERATE_"
        return self.variable_if_other or prefix + self.key.upper()


REFUSED = (
    Setting("gradient_accumulation_steps", ("1", "auto"), "it follows from batch in the recipe"),
    Setting("gradient_clipping", ("auto", "none"), "set optimizer.clip_norm in the recipe"),
    # Accelerate recomputes with different dropout masks.
    Setting("fsdp_activation_checkpointing", ("false",), "set compute.activation_checkpointing in the recipe"),
    # FSDP2's units are formed without it: the gradient norm would be computed on the host, where NCCL cannot reduce it.
    Setting("fsdp_offload_params", ("false",), "launch with zero3_offload.yaml to offload"),
    # Models with BatchNorm fail with it.
    Setting("fsdp_cpu_ram_efficient_loading", ("false",), "every process builds the same weights anyway"),
    Setting("fsdp_ignored_modules", ("", "none"), "every parameter is sharded"),
    Setting("fsdp_auto_wrap_policy", ("transformer_based_wrap", "no_wrap"), "the model's _no_split_modules decide"),
    Setting(
        "fsdp_transformer_layer_cls_to_wrap",
        ("", "none"),
        "name the blocks in the model's _no_split_modules",
        "FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    Setting("dynamo_backend", ("no",), "set compute.compile in the recipe"),
    Setting("megatron_lm_config", ("false",), "largebatch is not tested with it", "ACCELERATE_USE_MEGATRON_LM"),
    Setting("parallelism_config_dp_replicate_size", ("1",), "it follows from the processes and the dp_shard_size"),
    *(Setting(f"parallelism_config_{kind}_size", ("1",), DATA_PARALLELISM) for kind in ("tp", "cp", "sp")),
)
UNLESS_FSDP = Setting("parallelism_config", ("false",), DATA_PARALLELISM, "ACCELERATE_USE_PARALLELISM_CONFIG")
"""Refused unless the launch is for FSDP, for which the section forms groups of processes that shard the model."""
SHARD_SIZE = "LARGEBATCH_SHARD_SIZE"
DP_SHARD_SIZE = "PARALLELISM_CONFIG_DP_SHARD_SIZE"


@dataclass(frozen=True)
class Launch:
    """One process of a job, as its launcher describes it."""

    strategy: str  # a name in the table of `plan.strategies`
    rank: int
    world_size: int
    local_world_size: int  # number of processes on this machine
    deepspeed_config: Mapping[str, Any] | None = None  # the checked DeepSpeed JSON, for the ZeRO strategies
    shard_size: int | None = None  # number of processes that together hold a copy of the model, for HSDP
    reshards: bool = True  # whether FSDP2 gathers the weights of blocks again for the backward pass

    @property
    def entry(self) -> StrategyEntry:
        return find_strategy(self.strategy)

    @property
    def sharing(self) -> Strategy:
        """How the processes share a model, with the settings that memory and traffic depend on."""
        zero = ZeroSettings.of(self.deepspeed_config["zero_optimization"] if self.deepspeed_config else {"stage": 0})
        return Strategy(self.strategy, zero, self.reshards, self.shard_size)


def read_launch(environment: Mapping[str, str] = os.environ, config: RecipeConfig | None = None) -> Launch:
    """Read how this process was launched: by `accelerate launch`, by torchrun, or alone.

    Args:
        environment: The process's environment variables.
        config: The recipe, which the launch must not contradict and the strategy must support; None means any in fp32.

    Raises:
        LaunchError: The launch would silently train something other than the recipe, or cannot train it.
    """
    _refuse_use_cpu(environment)
    _refuse_tasks_without_a_launcher(environment)
    engine = engine_of(environment)
    for setting in refused_settings(engine == "FSDP", config.precision if config else "fp32"):
        value = environment.get(setting.variable, setting.off[0])
        if value.lower() not in setting.off:
            raise LaunchError(f"the Accelerate config has {setting.key}: {value}; remove it; {setting.why}")
    rank = whole_number("RANK", 0, environment)
    world_size = whole_number("WORLD_SIZE", 1, environment)
    local_world_size = whole_number("LOCAL_WORLD_SIZE", 1, environment)
    if not (rank < world_size and 1 <= local_world_size <= world_size):
        raise LaunchError(
            f"RANK {rank}, WORLD_SIZE {world_size} and LOCAL_WORLD_SIZE {local_world_size} contradict each other; "
            "unset them, and start processes with `accelerate launch` or torchrun"
        )
    version = environment.get("FSDP_VERSION", "1")
    if engine == "FSDP" and version != FSDP_VERSION:
        raise LaunchError(f"the Accelerate config has fsdp_version: {version}; write fsdp_version: 2: {NOT_FSDP2}")
    deepspeed_config = read_deepspeed_config(environment) if engine == "DeepSpeed" else None
    stage = deepspeed_config["zero_optimization"]["stage"] if deepspeed_config else None
    in_groups = engine == "FSDP" and is_true(environment, UNLESS_FSDP.variable)
    entry = next(
        entry
        for entry in (SINGLE, *STRATEGIES.values())
        if (entry.engine, entry.zero_stage, entry.replicates_shards) == (engine, stage, in_groups)
    )
    if config and (refusal := entry.refusal_of(config)):
        raise LaunchError(refusal)
    shard_size = None
    if entry.replicates_shards:
        shard_size = read_shard_size(environment, local_world_size)
        _check_shard_size(shard_size, world_size, local_world_size)
    reshards = is_true(environment, "FSDP_RESHARD_AFTER_FORWARD", "true")
    return Launch(entry.name, rank, world_size, local_world_size, deepspeed_config, shard_size, reshards)


def is_true(environment: Mapping[str, str], name: str, default: str = "false") -> bool:
    """Whether a variable is set to one of the forms of true that Accelerate's `str_to_bool` knows."""
    return environment.get(name, default).lower() in ("y", "yes", "t", "true", "on", "1")


def engine_of(environment: Mapping[str, str]) -> Engine:
    """The engine that a process was launched for."""
    if is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        return "DeepSpeed"
    if is_true(environment, "ACCELERATE_USE_FSDP"):
        return "FSDP"
    return "DDP" if "WORLD_SIZE" in environment else "one process"


def read_shard_size(environment: Mapping[str, str], local_world_size: int) -> int:
    """Read the number of processes that HSDP shards the model over; by default, and for a size of 1, those of a node.

    Raises:
        LaunchError: The setting is not a whole number.
    """
    if SHARD_SIZE in environment:
        return whole_number(SHARD_SIZE, local_world_size, environment)
    size = whole_number(DP_SHARD_SIZE, 1, environment)
    return local_world_size if size == 1 else size


def _check_shard_size(shard_size: int, world_size: int, local_world_size: int) -> None:
    divisors = [size for size in range(min(2, world_size), world_size + 1) if world_size % size == 0]
    # Parts of a node, or whole nodes.
    sizes = [size for size in divisors if local_world_size % size == 0 or size % local_world_size == 0]
    if shard_size not in sizes:
        raise LaunchError(
            f"hsdp cannot shard the model over groups of {shard_size}: with {world_size} processes, {local_world_size} "
            f"per node, set {SHARD_SIZE} to one of {', '.join(map(str, sizes))}, or launch with ddp or fsdp"
        )


def end_with_the_launcher() -> None:
    """Have the kernel end this process when its launcher dies, even by SIGKILL, which would otherwise orphan it."""
    if is_launched():
        end_with_parent()


def is_launched() -> bool:
    """Whether torch's launcher, which `accelerate launch` uses for several processes, has started this one."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def notes_on_stopping(stop_file: Path) -> list[str]:
    """Lines for people whose launcher may kill the processes before they have saved."""
    seconds = whole_number(SHUTDOWN_TIMEOUT, 30)
    if not is_launched() or seconds >= SECONDS_TO_SAVE:
        return []
    return [
        f"{seconds} s after Ctrl+C or SIGTERM, the launcher kills processes that still save a checkpoint: start it",
        f"with {SHUTDOWN_TIMEOUT}=1800, or stop the run by `touch {shlex.quote(str(stop_file))}`",
    ]


def refused_settings(is_fsdp: bool, precision: str = "no") -> list[Setting]:
    """The settings that must be off in a launch of a recipe, whose precision may be named once more."""
    settings = [Setting("mixed_precision", ("no", precision), "set precision in the recipe"), *REFUSED]
    return settings if is_fsdp else [*settings, UNLESS_FSDP]


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
    is_only_one = {"MASTER_ADDR", "ACCELERATE_USE_CPU"} <= environment.keys() and "WORLD_SIZE" not in environment
    if is_true(environment, "ACCELERATE_USE_CPU") or is_only_one:
        raise LaunchError(
            "the Accelerate config has use_cpu: true or a distributed_type that is none of "
            f"{', '.join(STARTS_PROCESSES)}, so each process would train alone; use one of recipes/accelerate_configs, "
            "which run on the CPU without a GPU"
        )
