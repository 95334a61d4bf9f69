"""Joins the job: starts Accelerate for the launched strategy, on GPUs or, from the same files, on CPU processes."""

import logging
import os
import resource
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name

import torch
from accelerate.utils import InitProcessGroupKwargs

from largebatch.backend.base import Backend
from largebatch.backend.launch import Launch
from largebatch.backend.processes import PATIENCE
from largebatch.errors import LaunchError
from largebatch.plan import RunPlan
from largebatch.system.variables import whole_number


def start(launch: Launch, plan: RunPlan) -> Backend:
    """Start Accelerate for the launched strategy and the plan.

    Without a GPU the processes communicate over gloo; strategy, plan and every check are the same.

    Args:
        launch: What the launcher asked for.
        plan: The resolved plan.

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
    if on_gpu:
        # Let cuDNN try its algorithms for each shape; those it prefers may differ from one start to the next.
        torch.backends.cudnn.benchmark = not plan.compute.deterministic
    if plan.loss_weight_per_sample is None:
        # Samples have different lengths, and cuDNN builds a plan for each new shape of a micro-batch.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if plan.compute.deterministic:
        _use_deterministic_kernels()
    _allow_open_files()
    backend_class: type[Backend] = resolve_name(launch.entry.backend)
    # The engine, whose message says less, gives up on a hanging job later than the run's watchdog.
    hang_seconds = plan.faults.hang_seconds
    timeout = PATIENCE if hang_seconds is None else timedelta(seconds=2 * hang_seconds + 60)
    group = InitProcessGroupKwargs(timeout=timeout)
    # As Accelerate decides whether there are others.
    has_others = launch.world_size > 1 or "LOCAL_RANK" in os.environ
    if has_others and not (os.environ.get("MASTER_ADDR") and whole_number("MASTER_PORT", 0)):
        raise LaunchError(
            "WORLD_SIZE or LOCAL_RANK is set, but not both MASTER_ADDR and MASTER_PORT; unset them, or start processes "
            "with `accelerate launch` or torchrun"
        )
    # NCCL's own watchdog would end a process whose thread is stuck for 8 minutes.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(round(timeout.total_seconds())))
    # How many of its latest collectives torch records, to tell after a hang which process is missing.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_own_folder() / "torchinductor"))
    backend = backend_class(launch, plan, group)
    if backend.world_size != launch.world_size:
        raise LaunchError(
            f"{launch.world_size} processes were launched, but this one sees {backend.world_size}: each would train "
            "alone; use one of recipes/accelerate_configs"
        )
    return backend


def _own_folder() -> Path:
    """A folder on this machine that only this user can write to, such as for compiled code, which torch executes.

    Torch's own, in /tmp, may have been made by another user.
    """
    folder = Path(tempfile.gettempdir(), f"largebatch_{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp())


def _use_deterministic_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Read when CUDA and NCCL start; cuBLAS and NCCL's choice of algorithm are not torch's.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_PROTO", "Simple")


def _allow_open_files() -> None:
    """Raise this process's limit on open files, usually 1,024, as far as it may: gloo connects it with all others."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
