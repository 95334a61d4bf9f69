"""What a node checks by itself."""

import fcntl
import hashlib
import re
import resource
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import largebatch
from largebatch.config import task_of
from largebatch.errors import reason_of
from largebatch.system.installed import installed_versions
from largebatch.tools.preflight.reports import Node, Report, Severity
from largebatch.words import counted

FREE_SHARE_OF_GPU = 0.9
SECONDS_TO_CONNECT = 30.0
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def check_node(node: Node) -> Report:
    """Check this node."""
    faults = [*_gpu_problems(node.gpus), *_connection_problems(node)]
    refusals = [*_unwanted_gpus(node.gpus), *_missing_abilities(node.folder, node.name)]
    findings = dict.fromkeys(faults, Severity.BAD_NODE) | dict.fromkeys(refusals, Severity.REFUSED)
    return Report(node.name, findings, _versions(node))


# --- software and limits ------------------------------------------------------------------------------------------


def _versions(node: Node) -> dict[str, str]:
    versions = installed_versions()
    versions["the code of largebatch (checksum)"] = _checksum(Path(largebatch.__file__).parent.rglob("*.py"))
    for file in (node.recipe, *task_of(node.recipe).rglob("*.py"), node.accelerate_config):
        versions[f"{file} (checksum)"] = _checksum([file])
    versions["open files (ulimit -n)"] = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    versions["locked memory (ulimit -l; -1: unlimited)"] = str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    versions["the GPU driver"] = _driver_version()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if gpus:
        versions["the GPUs"] = ", ".join(gpus)
        versions["NCCL"] = str(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return versions


def _checksum(files: Iterable[Path]) -> str:
    checksum = hashlib.sha256()
    for file in sorted(files):
        checksum.update(file.read_bytes())
    return checksum.hexdigest()[:12]


def _driver_version() -> str:
    for file in DRIVERS:
        if file.is_file():
            found = re.search(r"\d+\.\d[\d.]*", file.read_text(encoding="utf-8", errors="replace"))
            return found[0] if found else "unknown"
    return "none"


# --- GPUs ---------------------------------------------------------------------------------------------------------


def _unwanted_gpus(gpus: int) -> Iterator[str]:
    found = torch.cuda.device_count()
    if found and not gpus:
        yield (
            f"{counted(found, 'GPU')} visible, and the job asked for none: ask for them, or set "
            f"LARGEBATCH_PROCESSES_PER_NODE={found} if this site does not manage them; to train on CPUs, set "
            "CUDA_VISIBLE_DEVICES to an empty value"
        )


def _gpu_problems(gpus: int) -> Iterator[str]:
    """Yield which GPUs are missing, broken, or held by another job's leftovers."""
    if not gpus:
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    # An AssertionError, among others.
    except Exception as error:
        yield f"no GPU can be used, and the job was given {gpus}: {reason_of(error)}"
        return
    found = torch.cuda.device_count()
    if found < gpus:
        yield f"{counted(found, 'GPU')} visible, and the job was given {gpus}"
        return
    for index in range(gpus):
        try:
            free, total = torch.cuda.mem_get_info(index)
            ones = torch.ones(512, 512, device=f"cuda:{index}")
            if not ((ones @ ones) == 512).all():
                yield f"GPU {index} computes wrong results"
        except RuntimeError as error:
            yield f"GPU {index} fails: {str(error).splitlines()[0]}"
            continue
        if free < FREE_SHARE_OF_GPU * total:
            yield f"GPU {index} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free: another process is using it"


# --- the first node and the run folder ----------------------------------------------------------------------------


def _connection_problems(node: Node) -> Iterator[str]:
    if node.rank > 0:
        try:
            socket.create_connection((node.host, node.port), SECONDS_TO_CONNECT).close()
        except OSError as error:
            yield f"cannot connect to the first node at {node.host}:{node.port}: {reason_of(error)}"


def _missing_abilities(folder: Path, name: str) -> Iterator[str]:
    """Yield what the run folder's file system lacks of what runs need; OSError if it cannot be written."""
    file = folder / f"{name}.probe_1"
    other = folder / f"{name}.probe_2"
    ability = "locks (flock)"
    other.touch()
    try:
        with file.open("w", encoding="utf-8") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ability = "renaming a file over another"
        file.rename(other)
        ability = "hard links"
        file.hardlink_to(other)
    except OSError as error:
        yield (
            f"the run folder's file system does not support {ability}: {error.strerror}; set RUN_DIR to a POSIX file "
            "system, such as NFS, or Lustre mounted with -o flock, and not a mounted object store"
        )
    finally:
        file.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
