"""Joining the job: Accelerate, started for the launched strategy, on GPUs or, from the same files, on CPU processes."""

import logging
import os
import sys
import warnings
from datetime import timedelta

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from largebatch.backend.base import Backend
from largebatch.backend.deepspeed_config import fill_from_plan
from largebatch.backend.launch import Launch
from largebatch.backend.native import DdpBackend, FsdpBackend, SingleBackend
from largebatch.errors import LaunchError
from largebatch.plan import RunPlan


def start(
    launch: Launch, plan: RunPlan, trackers: list[str], project_dir: str, hang_seconds: float | None = None
) -> Backend:
    """Start Accelerate for the launched strategy and the plan's precision and clipping.

    Without a GPU the processes talk over gloo; strategy, plan and every check are the same.

    Args:
        launch: What the launcher asked for.
        plan: The resolved plan.
        trackers: Names of Accelerate's trackers.
        project_dir: Where trackers that write files write them.
        hang_seconds: When the run's watchdog ends a job that hangs; the engine is to give up later than that, for it
            tells less.

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
    start_strategy = _start_zero if launch.strategy.startswith("zero") else _start_native
    group = InitProcessGroupKwargs()
    if hang_seconds is not None:
        group.timeout = timedelta(seconds=2 * hang_seconds + 60)
    backend = start_strategy(launch, plan, on_gpu, group, {"log_with": trackers, "project_dir": project_dir})
    if backend.world_size != launch.world_size:
        raise LaunchError(
            f"{launch.world_size} processes were launched, but this one sees {backend.world_size}: each would train "
            "alone; use one of recipes/accelerate_configs"
        )
    return backend


def quiet(rank: int) -> None:
    """Silence the engines' chatter; warnings are for the first process only."""
    # A filter, since DeepSpeed sets its logger's level when it is imported, and warns meanwhile.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    # Libraries of models and data are a recipe's to import, before the start or after it.
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
    # One engine's use of what another has deprecated is nothing the user can mend.
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|accelerate|deepspeed|transformers)\.")


def _start_native(
    launch: Launch, plan: RunPlan, on_gpu: bool, group: InitProcessGroupKwargs, tracking: dict[str, object]
) -> Backend:
    # Autocast is applied in `NativeBackend._wrap`, alike for all.
    arguments: dict[str, object] = {"mixed_precision": "no", "kwargs_handlers": [group], **tracking}
    if launch.strategy == "fsdp":
        if not on_gpu:
            _rehearse_fsdp_on_cpu()
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        backend_class: type[Backend] = FsdpBackend
    else:
        arguments["cpu"] = not on_gpu
        # Buffers are averaged before they are used; broadcasting rank 0's would lose the other processes' statistics.
        arguments["kwargs_handlers"] = [
            group,
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ]
        backend_class = DdpBackend if launch.strategy == "ddp" else SingleBackend
    accelerator = Accelerator(**arguments)
    return backend_class(accelerator, launch, plan)


def _start_zero(
    launch: Launch, plan: RunPlan, on_gpu: bool, group: InitProcessGroupKwargs, tracking: dict[str, object]
) -> Backend:
    # Imported only where it is used: it takes a second or two.
    import deepspeed
    from accelerate import DeepSpeedPlugin
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from largebatch.backend.zero import ZeroBackend

    if not on_gpu:
        # DeepSpeed would compile a shared-memory collective (some 40 s), and a run killed meanwhile would leave a lock
        # on which every later run waits for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        group.backend = "gloo"
    assert launch.deepspeed_config is not None
    plugin = DeepSpeedPlugin(
        hf_ds_config=fill_from_plan(launch.deepspeed_config, plan),
        gradient_accumulation_steps=1,
        gradient_clipping=plan.clip_norm or 0.0,
        zero3_init_flag=False,
    )
    accelerator = Accelerator(mixed_precision="no", deepspeed_plugin=plugin, kwargs_handlers=[group], **tracking)
    # Accelerate has told `transformers` of ZeRO-3, whose Auto classes would cut up weights as they make them, before
    # anything can look at them. Models are built whole on every strategy, and cut up by `prepare`.
    unset_hf_deepspeed_config()
    return ZeroBackend(accelerator, launch, plan)


def _rehearse_fsdp_on_cpu() -> None:
    """Accelerate turns FSDP on for accelerator devices only: tell it that the CPU is one, over gloo."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    def prepare_backend(*_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend
