"""What a node checks by itself."""

import hashlib
import re
import resource
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import largebatch
from largebatch.config import RecipeConfig, load_config, task_of
from largebatch.errors import UserError, reason_of
from largebatch.estimate.model_shape import Strategy
from largebatch.plan import resolve
from largebatch.plan.strategies import SINGLE
from largebatch.system.failures import kind_of
from largebatch.system.installed import installed_versions
from largebatch.tools.preflight.connection import connection_problem
from largebatch.tools.preflight.reports import Node
from largebatch.tools.preflight.run_folder import missing_ability
from largebatch.tools.preflight.verdict import Findings

FREE_SHARE_OF_GPU = 0.9
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def check_node(node: Node, recipe: Path, accelerate_config: Path, overrides: Sequence[str]) -> Findings:
    """Check this node."""
    findings = Findings(node.name)
    findings.versions = _versions([recipe, *sorted(task_of(recipe).rglob("*.py")), accelerate_config])
    findings.versions |= _gpu_versions() | _limits()
    found = torch.cuda.device_count()
    if found and not node.gpus:
        findings.refusals.append(
            f"there are {found} GPUs, and the job asked for none: ask for them, or set "
            f"LARGEBATCH_PROCESSES_PER_NODE={found} if this site does not manage them; to train on CPUs, set "
            "CUDA_VISIBLE_DEVICES to an empty value"
        )
    findings.problems += _gpu_problems(node.gpus, found)
    if node.rank > 0:
        findings.unreachable = connection_problem(node)
    if refusal := missing_ability(node.folder, node.name):
        findings.refusals.append(refusal)
    elif node.rank == 0 and not findings.refusals:
        check_room_for_checkpoints(findings, node.folder, recipe, overrides)
    return findings


# --- software and limits ------------------------------------------------------------------------------------------


def _versions(files: Iterable[Path]) -> dict[str, str]:
    code = _checksum(sorted(Path(largebatch.__file__).parent.rglob("*.py")))
    checksums = {f"{file} (checksum)": _checksum([file]) for file in files}
    return {**installed_versions(), "the code of largebatch (checksum)": code, **checksums}


def _checksum(files: Iterable[Path]) -> str:
    checksum = hashlib.sha256()
    for file in files:
        checksum.update(file.read_bytes() if file.exists() else b"missing")
    return checksum.hexdigest()[:12]


def _limits() -> dict[str, str]:
    limits = {"open files (ulimit -n)": resource.RLIMIT_NOFILE, "locked memory (ulimit -l)": resource.RLIMIT_MEMLOCK}
    values = {name: resource.getrlimit(number)[0] for name, number in limits.items()}
    return {name: "unlimited" if value == resource.RLIM_INFINITY else str(value) for name, value in values.items()}


# --- GPUs ---------------------------------------------------------------------------------------------------------


def driver_version() -> str:
    """The version of the GPUs' kernel driver; empty without one."""
    for file in DRIVERS:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            found = re.search(r"\d+\.\d[\d.]*", text)
            return found[0] if found else text.strip()
    return ""


def _gpu_versions() -> dict[str, str]:
    versions = {"the GPU driver": driver_version() or "none", "the CUDA that torch was built for": _built_for()}
    if torch.cuda.device_count():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        versions["the GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        versions["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return versions


def _built_for() -> str:
    return torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "none")


def _gpu_problems(gpus: int, found: int) -> list[str]:
    """GPUs that are missing, broken, or held by another job's leftovers."""
    if found < gpus:
        reason = f": {_reason_for_no_gpu()}" if not found else ""
        return [f"{found} GPUs are visible, but the job was given {gpus}{reason}"]
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


def _reason_for_no_gpu() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    # An AssertionError, among others.
    except Exception as error:
        return reason_of(error)
    return "CUDA starts, but CUDA_VISIBLE_DEVICES or the container hides them"


# --- checkpoints --------------------------------------------------------------------------------------------------


def check_room_for_checkpoints(findings: Findings, folder: Path, recipe: Path, overrides: Sequence[str]) -> None:
    """Find out whether two checkpoints fit on the disk, and whether the recipe's model can be built at all."""
    try:
        needed = 2 * checkpoint_bytes(load_config(recipe, overrides))
    # The task's author wrote it, so it may raise anything.
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else reason_of(error)
        # A hub that does not answer now may answer when training starts.
        if kind_of(error.__cause__ or error) in ("communication", "files"):
            findings.notes.append(f"whether two checkpoints fit on the disk was not checked: {reason}")
        else:
            findings.refusals.append(f"the recipe's model cannot be built: {reason}")
        return
    free = shutil.disk_usage(folder).free
    figures = f"two checkpoints take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in the run folder"
    if free < needed:
        findings.refusals.append(f"{figures}; free some space, or set RUN_DIR to a folder on a larger disk")
    else:
        findings.notes.append(figures)


def checkpoint_bytes(config: RecipeConfig) -> int:
    """Size of a checkpoint, which has what one process alone holds: weights, buffers and optimizer states."""
    from largebatch.backend.fsdp_units import shape_of
    from largebatch.estimate.memory import model_states
    from largebatch.estimate.recipe_model import recipe_model

    plan = resolve(config, world_size=1)
    shape = shape_of(recipe_model(config)[0], plan)
    held = model_states(shape, Strategy(SINGLE.name), 1, plan.states_of, micro_batches=1)
    return held.weights + held.buffers + held.optimizer
