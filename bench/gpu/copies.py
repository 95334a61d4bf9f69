"""Copies while the GPU is far behind the host: the host does not wait, and nothing is copied too early or too late.

On an idle GPU, a program that forgets to wait for a stream is usually lucky. Here, streams hold kernels that only take
time, so that it never is.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.rows import SINGLE, Deadline, Launcher, NotMeasured, Result, Row
from record import Figure

# Long beside what the host does meanwhile: about 50 ms of a GPU.
CYCLES = 10**8
NUM_BATCHES = 20
ELEMENTS = 2**24


class _Numbers:
    """A source whose micro-batch is full of its index."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def fetch(self, indices: Any, _epoch: int | None) -> dict[str, torch.Tensor]:
        return {"number": torch.full((2**16,), float(indices[0]))}

    def weight(self, _batch: dict[str, torch.Tensor]) -> int:
        return 1


def load_behind() -> dict[str, float]:
    """Micro-batches that a late GPU reads: how many have other numbers, and the host's share of the time."""
    from largebatch.data.loading import load

    def load_all() -> tuple[list[torch.Tensor], float]:
        requests = [(np.array([index]), 0) for index in range(NUM_BATCHES)]
        began = time.perf_counter()
        means = []
        for batch, _ in load(_Numbers(), requests, 0, torch.device("cuda", 0)):
            torch.cuda._sleep(CYCLES)
            means.append(batch["number"].mean())
            del batch
        return means, time.perf_counter() - began

    # The first time, page-locked memory is allocated.
    load_all()
    torch.cuda.synchronize()
    began = time.perf_counter()
    means, host_seconds = load_all()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    wrong = sum(mean.item() != index for index, mean in enumerate(means))
    return {"wrong micro-batches": wrong, "share of the time that the host loads": host_seconds / seconds}


def copy_behind() -> dict[str, float]:
    """A copy to the memory of checkpoints: the host's share of its time, and whether a forked process has it."""
    from largebatch.run.checkpoint.staging import Staging

    staging = Staging(page_locked=True)
    target = staging.tensors({"weight": (torch.float32, (ELEMENTS,))})["weight"]
    source = torch.ones(ELEMENTS, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    target.copy_(source, non_blocking=True)
    host_seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    child = os.fork()
    if child == 0:
        os._exit(_is_mapped(target.data_ptr()))
    inherited = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {
        "wrong elements": int((target != 1).sum()),
        "share of the time that the host copies": host_seconds / seconds,
        "forked processes with the memory": inherited,
    }


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = line.split()[0].split("-")
        if int(first, 16) <= address < int(last, 16):
            return True
    return False


def train_behind(recipe: Path, words: Sequence[str]) -> dict[str, float]:
    """Train with a checkpoint of each step, asynchronous ones and others: how many differ in any bit."""
    from largebatch.run import Run
    from largebatch.run.checkpoint.save import CheckpointWriter
    from largebatch.tools.local_jobs.training import train

    update = Run.update
    copy = CheckpointWriter._copy

    def late_update(run: Any, step: Any) -> None:
        torch.cuda._sleep(CYCLES)
        update(run, step)

    def late_copy(writer: CheckpointWriter, *states: Any) -> None:
        with torch.cuda.stream(writer._copy_stream):
            torch.cuda._sleep(CYCLES)
        copy(writer, *states)

    Run.update = late_update  # type: ignore[method-assign]
    CheckpointWriter._copy = late_copy  # type: ignore[method-assign]
    found = []
    for asynchronous in ("true", "false"):
        with tempfile.TemporaryDirectory() as folder:
            settings = ('--checkpoint.every={"steps": 1}', "--checkpoint.keep_last=null")
            train(recipe, *words, *settings, f"--checkpoint.asynchronous={asynchronous}", run_dir=Path(folder, "run"))
            files = sorted(Path(folder, "run/checkpoints").glob("step_*/*.safetensors"))
            found.append({file.relative_to(folder): file.read_bytes() for file in files})
    assert found[0].keys() == found[1].keys()
    return {"checkpoints that differ": sum(found[0][name] != found[1][name] for name in found[0])}


def rows(launcher: Launcher, has_gpu: bool, recipe: Path, words: Sequence[str]) -> list[Row]:
    """One row per function above."""

    def measure(name: str, function: Callable[[], dict[str, float]], deadline: Deadline) -> list[Result]:
        if not has_gpu:
            raise NotMeasured("this machine has no GPU")
        found = launcher.run(deadline, SINGLE, function)
        return [
            Figure(f"{name}: {what}", "", [value], at_most=0.5 if what.startswith("share") else 0)
            for what, value in found.items()
        ]

    checks = {
        "loading behind a busy GPU": load_behind,
        "page-locked memory behind a busy GPU": copy_behind,
        "asynchronous checkpoints behind a busy GPU": partial(train_behind, recipe, words),
    }
    return [Row(name, partial(measure, name, function)) for name, function in checks.items()]
