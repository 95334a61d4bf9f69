"""The environment that `accelerate launch` would give the processes of a job on this machine."""

import os
from pathlib import Path

# How Accelerate config files of this project are called.
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def launch_environment(accelerate_config: Path, world_size: int) -> dict[str, str]:
    """The variables that all processes get, made from an Accelerate config by Accelerate's own code.

    Each process also needs its RANK and LOCAL_RANK, and all of them a place to meet; see `jobs.run_job`.

    Args:
        accelerate_config: The YAML file that would be launched with.
        world_size: Processes, all on this machine.
    """
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
    return changed | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
