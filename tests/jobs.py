"""Jobs of the tests: forked, with the environment that `accelerate launch` gives with the shipped configs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from largebatch.rehearsal import jobs, launch, training
from largebatch.rehearsal.jobs import JobFailed
from paths import ROOT

__all__ = ["JobFailed", "launch_environment", "run_job", "train"]


def run_job(
    function: Callable[..., Any],
    *arguments: Any,
    strategy: str = "ddp",
    world_size: int = 2,
    timeout: float = 180,
    environment: dict[str, str] | None = None,
    accelerate_configs: Path | None = None,
) -> list[Any]:
    """Call `function(*arguments)` in every process of a job, in the repository's root; the results by rank."""
    settings = launch_environment(strategy, world_size, accelerate_configs) if strategy != "single" else {}
    return jobs.run_job(
        function,
        *arguments,
        world_size=world_size,
        environment=settings | (environment or {}),
        folder=ROOT,
        timeout=timeout,
    )


def launch_environment(strategy: str, world_size: int, accelerate_configs: Path | None = None) -> dict[str, str]:
    """Of a shipped Accelerate config, or one in another folder."""
    folder = accelerate_configs or ROOT / "recipes/accelerate_configs"
    return launch.launch_environment(folder / f"{strategy}.yaml", world_size)


def train(recipe: Path, *overrides: str, run_dir: Path) -> None:
    """Run a shipped recipe in this process."""
    training.train(recipe.parent / "train.py", recipe, *overrides, run_dir=run_dir)
