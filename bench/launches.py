"""Launches of recipes and jobs, as the programs here make them."""

import sys
from pathlib import Path
from typing import Any

from record import ROOT


def accelerate_config(strategy: str) -> Path:
    """The shipped Accelerate config of a strategy."""
    return ROOT / f"recipes/accelerate_configs/{strategy}.yaml"


def launch_command(strategy: str, num_processes: int, script: Path, *words: str | Path) -> list[str]:
    """`accelerate launch` of a script under a strategy, by this environment."""
    accelerate = Path(sys.executable).with_name("accelerate")
    options = [f"--num_processes={num_processes}", "--config_file", accelerate_config(strategy)]
    return [str(word) for word in (accelerate, "launch", *options, script, *words)]


def job_options(strategy: str, world_size: int, timeout: float) -> dict[str, Any]:
    """Options of `largebatch.tools.local_jobs.jobs.run_job` for the processes of a strategy."""
    from largebatch.tools.plan.accelerate_configs import launch_environment

    environment = launch_environment(accelerate_config(strategy), world_size)
    return {"world_size": world_size, "environment": environment, "folder": ROOT, "timeout": timeout}
