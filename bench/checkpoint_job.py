"""The job that `checkpoints.py` measures: two processes that hold a model under DDP with AdamW's states.

Checkpoints are ours, by the real backend, and those of `torch.distributed.checkpoint`.
"""

import argparse
import ctypes
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from largebatch.backend.base import Backend
from largebatch.backend.launch import read_launch
from largebatch.backend.start import start
from largebatch.config import as_json, load_config
from largebatch.config.sections import Checkpoint
from largebatch.plan import resolve
from largebatch.run.checkpoint.load import load
from largebatch.run.checkpoint.save import CheckpointWriter
from largebatch.run.resume import checkpoints_of
from largebatch.storage.attempts import Attempt, claim
from largebatch.storage.catalog import verify_checksums
from largebatch.storage.layout import read_manifest
from paired import rotated
from record import OURS, ROOT, resident

RECIPE = ROOT / "recipes/causal_lm/gpt_pydoc.json"
WORLD_SIZE = 2
VOCABULARY = 4096
# Weights, exp_avg and exp_avg_sq, in fp32.
BYTES_A_PARAMETER = 12
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
MIB = 2**20

TORCH = "torch.distributed.checkpoint"
WITH_STATE_DICTS = f"{TORCH} with state dicts"
PLAIN = "plain write and fsync"
SYNCHRONOUS = "synchronous"
ASYNCHRONOUS = "asynchronous"
COMPLETE = "asynchronous until complete"

Rounds = list[dict[str, float]]


class Block(nn.Module):
    """Parameters in the shapes of a transformer's block, without its attention."""

    def __init__(self, width: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.mix(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.project(first * second.sigmoid() + third)
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """As many blocks as make up about so many bytes with AdamW's states."""

    def __init__(self, megabytes: int, width: int):
        super().__init__()
        wanted = megabytes * MIB / BYTES_A_PARAMETER - VOCABULARY * width
        size = sum(parameter.numel() for parameter in Block(width).parameters())
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(max(1, round(wanted / size)))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens)).square().mean()


class Job:
    """One process of the job: its backend, and checkpoints of ours and of torch's."""

    def __init__(self, settings: argparse.Namespace, folder: Path):
        config = load_config(RECIPE)
        plan = resolve(config, WORLD_SIZE)
        self.backend: Backend = start(read_launch(), plan)
        torch.manual_seed(0)
        model = Model(settings.megabytes, settings.width)
        self.largest = max(parameter.numel() for parameter in model.parameters()) * 4
        self.backend.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.optimizer = self.backend.optimizer.optimizer  # type: ignore[attr-defined]  # Accelerate's wrapper
        self.folder = folder
        self.tokens = torch.randint(VOCABULARY, (settings.tokens // 32, 32))
        self._config = as_json(config)
        attempt = claim(folder / "attempts", {}) if self.backend.is_main_process else None
        about = self.backend.gather_objects((attempt.number, attempt.token) if attempt else None)[0]
        self._attempt = Attempt(folder / "attempts", *about)
        self._number = 0

    def step(self, writer: CheckpointWriter | None = None) -> float:
        """One optimizer step, as a run makes it; returns the seconds that it waited for a writer's copy."""
        self.backend.begin_micro_step(0, 1)
        self.backend.backward(self.backend.model(self.tokens), 1.0)
        began = time.perf_counter()
        if writer is not None:
            writer.wait_until_copied()
        waited = time.perf_counter() - began
        self.backend.set_learning_rate(1e-4)
        self.backend.clip_and_step(measure_norm=False)
        return waited

    def writer(self, name: str, asynchronous: bool) -> CheckpointWriter:
        """A writer into a folder of its own."""
        folder = self.folder / name
        return CheckpointWriter(
            self.backend,
            folder,
            self._attempt,
            Checkpoint(keep_last=None, asynchronous=asynchronous),
            self._config,
            {},
            _fail,
            lambda _, reason: _fail(reason),
            heartbeat=lambda: None,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state that is trained."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.data for parameter in self.backend.model.parameters()), *states]

    def num_bytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def forget_states(self) -> None:
        """As in a new process. Torch's `get_state_dict` creates states only where there are no gradients, either."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad()

    # The whole state as torch's checkpoints take it.
    def state_dict(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.backend.model, self.optimizer)
        return {"model": weights, "optimizer": states}

    def together(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds from the first process's start of the work to the last one's end, and what this one's gave."""
        self.backend.gather_objects(None)
        began = time.perf_counter()
        result = work()
        times = self.backend.gather_objects((began, time.perf_counter()))
        return max(end for _, end in times) - min(begin for begin, _ in times), result

    def timed(self, way: str, work: Callable[[], Any]) -> dict[str, float]:
        """Seconds of a way; of torch's, by themselves and with the making of its state dicts."""
        seconds, inner = self.together(work)
        if way != TORCH:
            return {way: seconds}
        return {TORCH: max(self.backend.gather_objects(inner)), WITH_STATE_DICTS: seconds}

    def settle(self, *doomed: Path, drop_cache: bool = False) -> None:
        """Delete folders and let the disk come to rest; on request, forget what was read from it."""
        self.backend.gather_objects(None)
        if self.backend.is_main_process:
            for path in doomed:
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
            if drop_cache:
                DROP_CACHES.write_text("3\n")
        self.backend.gather_objects(None)

    def next_number(self) -> int:
        """For a step that no checkpoint has yet."""
        self._number += 1
        return self._number

    # --- what is compared

    def load_ours(self) -> None:
        """As a run that resumes: find the newest, read its checksums with all processes, load."""
        newest = checkpoints_of(self.folder / "ours", self.backend)[0]
        verify_checksums(newest, self.backend.rank, self.backend.world_size)
        self.backend.gather_objects(None)
        load(self.backend, newest, read_manifest(newest))

    def save_theirs(self, name: str) -> float:
        """As torch documents it; the seconds of `torch.distributed.checkpoint.save` alone."""
        state = self.state_dict()
        began = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self.folder / name))
        return time.perf_counter() - began

    def load_theirs(self) -> float:
        """As torch documents it; the seconds of `torch.distributed.checkpoint.load` alone."""
        state = self.state_dict()
        began = time.perf_counter()
        dcp.load(state, checkpoint_id=self.folder / "theirs")
        seconds = time.perf_counter() - began
        set_state_dict(
            self.backend.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return seconds


def _rounds(settings: argparse.Namespace, ways: list[str], measure: Callable[[str], dict[str, float]]) -> Rounds:
    """The seconds of all ways in each round; the first round is not counted."""
    rounds = []
    for number in range(settings.pairs + 1):
        seconds: dict[str, float] = {}
        for way in rotated(ways, number):
            seconds |= measure(way)
        rounds.append(seconds)
    return rounds[1:]


def _fail(text: str) -> None:
    raise RuntimeError(text)


def measure_saves(settings: argparse.Namespace, folder: Path) -> Rounds:
    """Synchronous saves of ours and torch's, and plain writes of the same bytes."""
    job = Job(settings, folder)
    job.step()
    writer = job.writer("ours", asynchronous=False)
    share = os.urandom(MIB)
    num_parts = job.num_bytes() // WORLD_SIZE // MIB

    def plain() -> None:
        (folder / "plain").mkdir(exist_ok=True)
        with (folder / f"plain/{job.backend.rank}").open("wb", buffering=0) as file:
            for _ in range(num_parts):
                file.write(share)
            os.fsync(file.fileno())

    ways: dict[str, Callable[[], Any]] = {
        TORCH: lambda: job.save_theirs("theirs"),
        OURS: lambda: writer.save(job.next_number(), {"bad_steps": 0}),
        PLAIN: plain,
    }

    def measure(way: str) -> dict[str, float]:
        job.settle()
        seconds = job.timed(way, ways[way])
        job.settle(folder / "ours", folder / "theirs", folder / "plain")
        return seconds

    return _rounds(settings, list(ways), measure)


def measure_loads(settings: argparse.Namespace, folder: Path) -> dict[str, Rounds]:
    """Loads of ours and torch's, into optimizers with states and without, from the page cache and from the disk."""
    job = Job(settings, folder)
    job.step()
    job.writer("ours", asynchronous=False).save(1, {"bad_steps": 0})
    job.save_theirs("theirs")
    right = [_fingerprint(tensor) for tensor in job.tensors()]
    ways = {TORCH: job.load_theirs, OURS: job.load_ours}
    result: dict[str, Rounds] = {}

    def measure(fresh: bool, cold: bool, way: str) -> dict[str, float]:
        if fresh:
            job.forget_states()
        for tensor in job.tensors():
            tensor.fill_(7)
        job.settle(drop_cache=cold)
        seconds = job.timed(way, ways[way])
        assert [_fingerprint(tensor) for tensor in job.tensors()] == right, way
        return seconds

    for fresh in (False, True):
        for cold in (False, True) if os.access(DROP_CACHES, os.W_OK) else (False,):
            states = "states created" if fresh else "states there already"
            case = f"load, {states}, {'page cache dropped' if cold else 'in page cache'}"
            result[case] = _rounds(settings, list(ways), partial(measure, fresh, cold))
    return result


def measure_stalls(settings: argparse.Namespace, folder: Path) -> tuple[float, Rounds]:
    """Seconds that a save holds training up: a run's first asynchronous one, and rounds of both kinds."""
    job = Job(settings, folder)
    job.step()
    writers = {
        SYNCHRONOUS: job.writer("sync", asynchronous=False),
        ASYNCHRONOUS: job.writer("async", asynchronous=True),
    }
    first, _ = job.together(lambda: writers[ASYNCHRONOUS].save(job.next_number(), {"bad_steps": 0}))
    first += max(job.backend.gather_objects(job.step(writers[ASYNCHRONOUS])))
    writers[ASYNCHRONOUS].wait()

    def measure(way: str) -> dict[str, float]:
        job.settle(folder / "sync", folder / "async")
        writer = writers[way]
        began = time.perf_counter()
        held_up, _ = job.together(lambda: writer.save(job.next_number(), {"bad_steps": 0}))
        if way == SYNCHRONOUS:
            return {way: held_up}
        # Training stands still in `save`, and where the next update waits for the copy.
        held_up += max(job.backend.gather_objects(job.step(writer)))
        writer.wait()
        return {way: held_up, COMPLETE: max(job.backend.gather_objects(time.perf_counter() - began))}

    return first, _rounds(settings, list(writers), measure)


def prepare_memory(settings: argparse.Namespace, folder: Path) -> None:
    """The checkpoints that the jobs of `measure_memory` load."""
    job = Job(settings, folder)
    job.step()
    job.writer("ours", asynchronous=False).save(1, {"bad_steps": 0})
    job.save_theirs("theirs")
    job.settle()


def measure_memory(settings: argparse.Namespace, folder: Path, case: str, by_torch: bool) -> tuple[int, int]:
    """Measure one of `MEMORY_CASES` in a process that has never done it before.

    Returns:
        The peak of its memory beyond its state, and what is aimed at, in bytes.
    """
    job = Job(settings, folder)
    job.step()
    state_bytes = job.num_bytes()
    made = 0
    if case == "load, states created":
        job.forget_states()
        made = state_bytes - job.num_bytes()
    writer = job.writer("scratch", asynchronous=case == "asynchronous save")

    def save_ours() -> None:
        writer.save(1, {"bad_steps": 0})
        writer.wait()

    if case.startswith("load"):
        work = job.load_theirs if by_torch else job.load_ours
    else:
        work = partial(job.save_theirs, "scratch_theirs") if by_torch else save_ours
    job.settle(folder / "scratch", folder / "scratch_theirs")
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    job.together(work)
    peak = resident("VmHWM") - before - made
    job.settle(folder / "scratch", folder / "scratch_theirs")
    return peak, state_bytes // WORLD_SIZE + job.largest


MEMORY_CASES = ("save", "asynchronous save", "load, states there", "load, states created")


def _fingerprint(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())
