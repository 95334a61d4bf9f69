"""Joins the job: starts Accelerate for the launched strategy, on GPUs or, from the same files, on CPU processes."""

import logging
import os
import sys
import warnings
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from largebatch.backend.base import Backend, Request
from largebatch.backend.launch import Launch
from largebatch.errors import LaunchError
from largebatch.named import load_named
from largebatch.plan import RunPlan


def start(
    launch: Launch, plan: RunPlan, trackers: list[str], project_dir: str, hang_seconds: float | None = None
) -> Backend:
    """Start Accelerate for the launched strategy and the plan.

    Without a GPU the processes communicate over gloo; strategy, plan and every check are the same.

    Args:
        launch: What the launcher asked for.
        plan: The resolved plan.
        trackers: Names of Accelerate's trackers.
        project_dir: Folder for trackers that write files.
        hang_seconds: Time after which the run's watchdog ends a hanging job. The engine, whose message says less, gives
            up later.

    Raises:
        LaunchError: There are more processes than GPUs, or the processes did not find each other.
    """
    quiet(launch.rank)
    on_gpu = torch.cuda.is_available()
    if on_gpu and launch.local_world_size > torch.cuda.device_count():
        raise LaunchError(
            f"{launch.local_world_size} processes were launched on a machine with {torch.cuda.device_count()} GPUs; "
            f"launch with --num_processes {torch.cuda.device_count()}, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to "
            "rehearse on the CPU"
        )
    if plan.precision == "fp32":
        # torch lets convolutions round their inputs to TF32 unless told otherwise.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    backend_class: type[Backend] = load_named(launch.entry.backend)
    group = InitProcessGroupKwargs()
    if hang_seconds is not None:
        group.timeout = timedelta(seconds=2 * hang_seconds + 60)
    arguments = backend_class.accelerate_arguments(Request(launch, plan, on_gpu, group))
    # The backends apply autocast, in the same way on every strategy.
    accelerator = Accelerator(mixed_precision="no", log_with=trackers, project_dir=project_dir, **arguments)
    backend = backend_class(accelerator, launch, plan)
    if backend.world_size != launch.world_size:
        raise LaunchError(
            f"{launch.world_size} processes were launched, but this one sees {backend.world_size}: each would train "
            "alone; use one of recipes/accelerate_configs"
        )
    return backend


def quiet(rank: int) -> None:
    """Silence the engines' chatter; warnings are for the first process only."""
    # A filter, because DeepSpeed sets its logger's level when it is imported, and warns during the import.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    # A recipe may import `transformers` and `datasets` before the start or after it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    if rank != 0:
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        if datasets := sys.modules.get("datasets"):
            datasets.disable_progress_bars()
        warnings.simplefilter("ignore")
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # Users cannot fix one library's use of another library's deprecated functions.
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|accelerate|deepspeed|transformers)\.")
