"""Checks of a node before a job trains on it: of itself, the shared run folder, and connections to the other nodes.

Nodes tell each other where they listen through the run folder, which must be shared anyway. They print what they find,
so that it arrives even if the folder is not shared or no node reaches another.
"""

import hashlib
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import largebatch
from largebatch.config import RecipeConfig, load_config
from largebatch.errors import UserError
from largebatch.installed import installed_versions
from largebatch.plan import resolve
from largebatch.storage.files import replace_file
from largebatch.tools.preflight.report import Report

SECONDS_TO_WAIT = 60.0
SECONDS_TO_CONNECT = 5.0
ALL_REDUCE_BYTES = 64 * 2**20
ALL_REDUCE_TIMES = 5
FREE_SHARE_OF_GPU = 0.9


@dataclass(frozen=True)
class Job:
    """The facts about the job that a node must know."""

    node: str  # this node's name
    rank: int  # from 0
    num_nodes: int
    folder: Path  # a folder that all nodes share, with the file `token` in it
    token: str  # what that file must say
    host: str  # where the processes will meet
    port: int  # the port there
    gpus: int  # GPUs that the job was given on each node; 0 for a job on CPUs
    world_size: int  # processes of the whole job
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS_TO_WAIT)
    """Until when to wait for other nodes, by `time.monotonic`."""


def check_node(job: Job, recipe: Path, accelerate_config: Path, overrides: Sequence[str]) -> Report:
    """Check this node; problems go into the report, whatever they are."""
    report = Report(job.node)
    try:
        _check(report, job, recipe, accelerate_config, overrides)
    except Exception as error:
        report.problems.append(f"{type(error).__name__}: {error}")
    return report


def _check(report: Report, job: Job, recipe: Path, accelerate_config: Path, overrides: Sequence[str]) -> None:
    report.versions = _versions([recipe, *sorted(recipe.parent.rglob("*.py")), accelerate_config])
    try:
        config: RecipeConfig = load_config(recipe, overrides)
        resolve(config, job.world_size)
    except UserError as error:
        report.refusal = str(error)
    report.problems += _gpu_problems(job.gpus)
    if not _until(job.deadline, lambda: _text(job.folder / "token").strip() == job.token):
        report.problems.append(
            f"{job.folder.resolve()} is not the folder that the batch script wrote to; the run folder must be on a "
            "file system that all nodes share"
        )
        return
    try:
        _tell(job, "present", "")
    except OSError as error:
        report.problems.append(f"the run folder cannot be written: {error}")
        return
    if job.num_nodes > 1:
        report.unreachable = _unreachable(job)
        _tell(job, "checked", "bad" if report.problems or report.unreachable or report.refusal else "good")
        verdicts = _of_all_nodes(job, "checked")
        if len(verdicts) == job.num_nodes and set(verdicts.values()) == {"good"}:
            try:
                measured = _all_reduce(job)
            except Exception as error:
                report.all_reduce_error = f"{type(error).__name__}: {error}"
            else:
                report.all_reduce = measured if job.rank == 0 else ""
    if job.rank == 0 and not report.refusal:
        # Last, because the other nodes need not wait for it.
        report.disk_problem, report.disk_note = _room_for_checkpoints(job.folder, recipe, config)


# --- the node itself ----------------------------------------------------------------------------------------------


def _versions(files: Iterable[Path]) -> dict[str, str]:
    versions = installed_versions()
    package = Path(largebatch.__file__).parent
    versions["the code of largebatch (checksum)"] = _checksum(sorted(package.rglob("*.py")))
    for file in files:
        versions[f"{file} (checksum)"] = _checksum([file])
    return versions


def _checksum(files: Iterable[Path]) -> str:
    checksum = hashlib.sha256()
    for file in files:
        checksum.update(file.read_bytes() if file.exists() else b"missing")
    return checksum.hexdigest()[:12]


def _gpu_problems(gpus: int) -> list[str]:
    """GPUs that are missing, broken, or held by another job's leftovers."""
    if not gpus:
        return []
    import torch

    found = torch.cuda.device_count()
    if found < gpus:
        return [f"{found} GPUs are visible, but the job was given {gpus}"]
    problems = []
    for index in range(gpus):
        try:
            free, total = torch.cuda.mem_get_info(index)
            ones = torch.ones(512, 512, device=f"cuda:{index}")
            right = bool(((ones @ ones) == 512).all())
        except RuntimeError as error:
            problems.append(f"GPU {index} fails: {str(error).splitlines()[0]}")
            continue
        if not right:
            problems.append(f"GPU {index} computes wrong results")
        if free < FREE_SHARE_OF_GPU * total:
            problems.append(
                f"GPU {index} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free: another process is using it"
            )
    return problems


def _room_for_checkpoints(folder: Path, recipe: Path, config: RecipeConfig) -> tuple[str, str]:
    """A problem and a note about the free disk space, one of which is empty."""
    try:
        needed = 2 * checkpoint_bytes(recipe, config)
    except Exception as error:
        reason = f"build_model(config) of model.py cannot be used: {type(error).__name__}: {error}"
        return "", f"it was not checked whether two checkpoints fit on the disk: {reason}"
    free = shutil.disk_usage(folder).free
    figures = f"two checkpoints take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in the run folder"
    if free < needed:
        return f"{figures}; free some space, or set RUN_DIR to a folder on a larger disk", ""
    return "", figures


def checkpoint_bytes(recipe: Path, config: RecipeConfig) -> int:
    """Size of a checkpoint: weights and optimizer states, counted on the recipe's model without memory."""
    from largebatch.backend.check import DTYPES
    from largebatch.plan.model_states import optimizer_states
    from largebatch.tools.plan.recipe_model import recipe_model

    model = recipe_model(config, recipe)[0].to(DTYPES[config.precision])
    kept = optimizer_states(resolve(config, world_size=1))
    size: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return size + sum(
        kept(tuple(parameter.shape)) * parameter.element_size()
        for parameter in model.parameters()
        if parameter.requires_grad
    )


# --- connections to the other nodes -------------------------------------------------------------------------------


def _unreachable(job: Job) -> list[tuple[str, int]]:
    """Nodes, with the port, that this one cannot connect to."""
    with ExitStack() as listening:
        # The kernel accepts connections by itself.
        server = listening.enter_context(_listen(0))
        if job.rank == 0:
            # Closed before the processes meet there.
            listening.enter_context(_listen(job.port))
        _tell(job, "port", str(server.getsockname()[1]))
        ports = _of_all_nodes(job, "port")
        places = [(node, int(ports[node])) for node in ports if node != job.node]
        if job.rank != 0:
            places.append((job.host, job.port))
        failed = [place for place in places if not _connects(*place)]
        # Others may still be about to connect to this node.
        _tell(job, "connected", "")
        _of_all_nodes(job, "connected")
    return failed


def _listen(port: int) -> socket.socket:
    """A socket that accepts connections at a port (any free one if 0), over IPv4 and IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), SECONDS_TO_CONNECT).close()
    except OSError:
        return False
    return True


def _all_reduce(job: Job) -> str:
    """Measure an all-reduce over all nodes, and return the result as a sentence."""
    import torch
    import torch.distributed

    backend, device = ("nccl", "cuda") if job.gpus else ("gloo", "cpu")
    torch.distributed.init_process_group(
        backend,
        f"tcp://{job.host}:{job.port}",
        rank=job.rank,
        world_size=job.num_nodes,
        timeout=timedelta(seconds=SECONDS_TO_WAIT),
    )
    tensor = torch.ones(ALL_REDUCE_BYTES // 4, device=device)
    seconds = []
    for _ in range(1 + ALL_REDUCE_TIMES):
        tensor.fill_(1)
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        total = float(tensor[-1])
        seconds.append(time.perf_counter() - began)
        if total != job.num_nodes:
            raise RuntimeError(f"the sum of {job.num_nodes} ones came out as {total}")
    torch.distributed.destroy_process_group()
    moved = 2 * (job.num_nodes - 1) / job.num_nodes * ALL_REDUCE_BYTES
    # The first one sets up connections.
    speed = moved / statistics.median(seconds[1:])
    return (
        f"all-reduce of {ALL_REDUCE_BYTES / 2**20:.0f} MiB over {job.num_nodes} nodes by {backend}, one process per "
        f"node: {speed / 1e9:.2f} GB/s (bus bandwidth, median of {ALL_REDUCE_TIMES})"
    )


# --- the shared folder --------------------------------------------------------------------------------------------


def _tell(job: Job, what: str, text: str) -> None:
    replace_file(job.folder / f"{job.node}.{what}", [memoryview(text.encode())])


def _of_all_nodes(job: Job, what: str) -> dict[str, str]:
    """The nodes' reports by node name, without those that did not arrive in time."""
    _until(job.deadline, lambda: len(list(job.folder.glob(f"*.{what}"))) == job.num_nodes)
    return {path.name.removesuffix(f".{what}"): _text(path) for path in job.folder.glob(f"*.{what}")}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _until(deadline: float, condition: Callable[[], bool]) -> bool:
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return met
