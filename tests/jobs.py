"""Jobs of the tests: forked, with the environment that `accelerate launch` gives with the shipped configs."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from largebatch.tools.local_jobs import jobs, training
from largebatch.tools.local_jobs.jobs import JobFailed as JobFailed
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from paths import ROOT
from tasks import TASKS

jobs.preload_tasks(
    [ROOT / "recipes" / task for task in TASKS],
    "sklearn.datasets",
    "pydoc_data.topics",
    # What the installed DeepSpeed imports when an engine starts; names inside it may change.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "setuptools.dist",
)

# Whether the test that runs is marked as slow; set by conftest.py.
allowed = True


def run_job(
    function: Callable[..., Any],
    *arguments: Any,
    strategy: str = "ddp",
    world_size: int | None = None,
    timeout: float = 600,
    environment: dict[str, str] | None = None,
    accelerate_configs: Path | None = None,
) -> list[Any]:
    """Call `function(*arguments)` in every process of a job, in the repository's root; the results by rank.

    Unless `world_size` says how many processes there are, there are two, or one of the strategy "single".
    """
    assert allowed, "this test starts a job: mark it with pytest.mark.slow"
    is_single = strategy == "single"
    world_size = world_size or (1 if is_single else 2)
    settings = {} if is_single else launch_environment(strategy, world_size, accelerate_configs)
    return jobs.run_job(
        function,
        *arguments,
        world_size=world_size,
        environment=settings | (environment or {}),
        folder=ROOT,
        timeout=timeout,
    )


def failure_of(function: Callable[..., Any], *arguments: Any, **place: Any) -> str | None:
    """The report of a job that fails; None if it does not."""
    try:
        run_job(function, *arguments, **place)
    except JobFailed as failure:
        return str(failure)
    return None


def launch_environment(strategy: str, world_size: int, accelerate_configs: Path | None = None) -> dict[str, str]:
    """Of a shipped Accelerate config, or one in another folder."""
    folder = accelerate_configs or ROOT / "recipes/accelerate_configs"
    return rehearsal_environment(folder / f"{strategy}.yaml", world_size)


def write_zero_config(folder: Path, stage: int, settings: dict[str, Any]) -> None:
    """The Accelerate config of a ZeRO stage, with other settings in its DeepSpeed JSON; for `accelerate_configs`."""
    zero = {"stage": stage, "contiguous_gradients": True, **settings}
    config = {"zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}
    (folder / "ds.json").write_text(json.dumps(config))
    accelerate = (ROOT / f"recipes/accelerate_configs/zero{stage}.yaml").read_text()
    accelerate = accelerate.replace(f"ds_configs/zero{stage}.json", str(folder / "ds.json"))
    (folder / f"zero{stage}.yaml").write_text(accelerate)


def train(recipe: Path, *overrides: str, run_dir: Path) -> None:
    """Run a shipped recipe in this process."""
    training.train(recipe, *overrides, run_dir=run_dir)


def train_in_job(recipe: Path, run_dir: Path, *overrides: str, **place: Any) -> None:
    """Run a recipe in the processes of a job."""
    run_job(partial(train, run_dir=run_dir), recipe, *overrides, **place)
