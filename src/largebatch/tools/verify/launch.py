"""The environment that `accelerate launch` would give the processes of a job on this machine."""

import os
from collections.abc import Sequence
from pathlib import Path

from largebatch.config import RecipeConfig
from largebatch.errors import UserError
from largebatch.plan.strategies import STRATEGIES


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


def find_accelerate_configs(
    recipe: Path, folder: Path | None, strategies: Sequence[str] | None, config: RecipeConfig
) -> dict[str, Path]:
    """The Accelerate config of each strategy: of the given folder, the recipe's own project, or this folder's.

    Args:
        recipe: Its JSON file.
        folder: Where they are; None looks for it.
        strategies: Names; None is all that can train the recipe.
        config: The recipe's.

    Raises:
        UserError: There is no such folder, or none of that name in it.
    """
    beside = recipe.resolve().parent.parent / "accelerate_configs"
    folders = [folder] if folder else [beside, Path("recipes/accelerate_configs")]
    found = next((place for place in folders if place.is_dir()), None)
    if found is None:
        places = " or ".join(str(place) for place in folders)
        raise UserError(
            f"there is no {places}; write --accelerate-configs FOLDER, the one with {next(iter(STRATEGIES))}.yaml and "
            "the others"
        )
    if strategies is None:
        suitable = [
            name for name, entry in STRATEGIES.items() if not entry.refusal(config.precision, config.optimizer.name)
        ]
        strategies = [name for name in suitable if (found / f"{name}.yaml").is_file()]
        if not strategies:
            raise UserError(
                f"{found} has no Accelerate config that the recipe's precision {config.precision} and optimizer "
                f"{config.optimizer.name} can be trained with; write --accelerate-configs FOLDER, one with some of "
                + ", ".join(f"{name}.yaml" for name in suitable)
            )
    missing = [name for name in strategies if not (found / f"{name}.yaml").is_file()]
    if missing:
        known = ", ".join(sorted(file.stem for file in found.glob("*.yaml")))
        raise UserError(f"--strategies: there is no {found / missing[0]}.yaml; known: {known}")
    return {name: (found / f"{name}.yaml").resolve() for name in strategies}
