"""The Accelerate configs of a project: the launches and the strategies that they stand for."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from largebatch.backend.launch import DP_SHARD_SIZE, SHARD_SIZE, is_true, read_launch, read_shard_size
from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.estimate.model_shape import Strategy
from largebatch.plan.strategies import STRATEGIES

DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
REHEARSED_SHARDS = 2


def launch_environment(accelerate_config: Path | None, world_size: int) -> dict[str, str]:
    """The variables that all processes, on this machine, get from Accelerate's own code for an Accelerate config.

    Without a config, they are torchrun's. Each process also needs its RANK and LOCAL_RANK, and all of them a
    rendezvous; see `jobs.run_job`.
    """
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    if accelerate_config is None:
        return sizes
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--config_file", str(accelerate_config), "--num_processes", str(world_size), "train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        launched = prepare_deepspeed_cmd_env(args)[1]
    else:
        launched = prepare_multi_gpu_env(args)
    changed = {name: value for name, value in launched.items() if os.environ.get(name) != value}
    file = changed.get(DEEPSPEED_FILE)
    if file and not Path(file).is_file():
        # It is meant to be launched from the top of its project, which may not be this folder.
        changed[DEEPSPEED_FILE] = str(accelerate_config.resolve().parents[2] / file)
    return changed | sizes


def rehearsal_environment(accelerate_config: Path | None, world_size: int) -> dict[str, str]:
    """The same, with shards of two processes for HSDP if its config leaves them to the nodes: this is one node."""
    environment = launch_environment(accelerate_config, world_size)
    in_groups = is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG")
    is_given = SHARD_SIZE in os.environ or environment.get(DP_SHARD_SIZE, "1") != "1"
    if in_groups and not is_given and world_size % REHEARSED_SHARDS == 0:
        environment[SHARD_SIZE] = str(REHEARSED_SHARDS)
    return environment


def is_rehearsed(strategy: str, world_size: int) -> bool:
    """Whether `verify` includes a strategy without being asked: HSDP only where it has replicas of several shards."""
    if not STRATEGIES[strategy].replicates_shards:
        return True
    return world_size % REHEARSED_SHARDS == 0 and world_size > REHEARSED_SHARDS


def find_accelerate_configs(strategies: Sequence[str] | None, config: RecipeConfig) -> dict[str, Path]:
    """The Accelerate config of each strategy; with None for `strategies`, of all that can train the recipe.

    They are in the folder of the recipe's own project, or else in that of the current folder.

    Raises:
        UserError: There is no such folder, or none of that name in it.
    """
    beside = config.task_folder().parent / "accelerate_configs"
    folder = beside if beside.is_dir() else Path("recipes/accelerate_configs")
    files = {file.stem: file.resolve() for file in sorted(folder.glob("*.yaml"))}
    if strategies is None:
        suitable = [name for name, entry in STRATEGIES.items() if not entry.refusal_of(config)]
        strategies = [name for name in suitable if name in files] or suitable
    if missing := [name for name in strategies if name not in files]:
        raise UserError(
            f"there is no {folder / missing[0]}.yaml; known: {', '.join(files) or 'none'}; Accelerate configs are in "
            "the folder accelerate_configs next to the task's folder, or in that of the current project"
        )
    return {name: files[name] for name in strategies}


def find_strategies(config: RecipeConfig, gpus_per_node: int) -> tuple[list[Strategy], Mapping[str, str]]:
    """Return the strategies as a run would be launched with them, and why others are not counted.

    Args:
        config: The recipe.
        gpus_per_node: Processes that hsdp shards over, unless its Accelerate config or LARGEBATCH_SHARD_SIZE sets them.

    Raises:
        UserError: There are no Accelerate configs.
    """
    found: list[Strategy] = []
    not_counted = {name: refusal for name, entry in STRATEGIES.items() if (refusal := entry.refusal_of(config))}
    for name, file in find_accelerate_configs(None, config).items():
        environment = {**os.environ, **launch_environment(file, world_size=gpus_per_node), "RANK": "0"}
        try:
            if is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
                # At least two replicas, whatever their size.
                environment["WORLD_SIZE"] = str(2 * gpus_per_node * (read_shard_size(environment, gpus_per_node) or 1))
            found.append(read_launch(environment, config).sharing)
        except UserError as error:
            not_counted[name] = str(error)
        except ValidationError as error:
            # For example "auto", which Accelerate replaces with a value that depends on the model.
            first = error.errors()[0]
            not_counted[name] = (
                f"its DeepSpeed JSON has zero_optimization.{first['loc'][0]} {json.dumps(first['input'])}"
            )
    return found, not_counted
