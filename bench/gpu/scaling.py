"""Scaling: GPT-2 on 1, 2, 4 and 8 GPUs of this machine, and the bandwidth of their all-reduce."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gpu.jobs import JOBS, config_of, train_job, units_of_step
from gpu.machine import Gpus
from gpu.rows import Deadline, Launcher, NotMeasured, Part, Result, Row
from paired import TurnClock, contender, start_job
from record import Figure

TITLE = "Scaling on the GPUs of one machine"
ABOUT = """GPT-2 124M with the same batch per GPU under DDP and FSDP2 on 1, 2, 4 and 8 GPUs of one machine: tokens per
second, and their ratio to as many times those of one GPU. The all-reduce is of 256 MiB in fp32; its bandwidth is that
of the bus, 2 (n - 1) / n times the bytes per second."""

SIZES = (1, 2, 4, 8)
STRATEGIES = ("ddp", "fsdp")
JOB = "gpt2_124m"
STEPS = 5
TURNS = 3


def ours(connections: Sequence[Connection], words: Sequence[str], run_dir: Path) -> None:
    """Train the job in this process, with a clock after each update."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else bool
    clock = TurnClock(connections[int(os.environ["RANK"])], STEPS, STEPS, synchronise)
    train_job(JOBS[JOB], words, run_dir, lambda _: clock.step())


def all_reduce(num_bytes: int) -> float:
    """Bytes per second over the bus, in this process of a job."""
    world_size = int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    synchronise = torch.cuda.synchronize if on_gpu else bool
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    tensor = torch.ones(num_bytes // 4, device=device)
    step = partial(torch.distributed.all_reduce, tensor)
    for calls in (3, 10):
        synchronise()
        started = time.perf_counter()
        for _ in range(calls):
            step()
        synchronise()
    seconds = (time.perf_counter() - started) / calls
    torch.distributed.destroy_process_group()
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


class Scaling:
    """The rows; those of several GPUs are compared with those of one.

    Args:
        sizes: Numbers of processes.
        is_small: Whether this is a rehearsal on the CPU.
    """

    def __init__(self, sizes: Sequence[int], is_small: bool):
        self._launchers = {size: Launcher(size, STRATEGIES) for size in sizes}
        self._is_small = is_small
        self._alone: dict[str, float] = {}

    def rows(self) -> Iterator[Row]:
        """Bandwidths first, which take seconds."""
        for size in self._launchers:
            if size > 1:
                yield Row(f"all-reduce, {size} processes", partial(self._bandwidth, size))
        for strategy in STRATEGIES:
            for size in self._launchers:
                yield Row(f"{strategy}, {size} processes", partial(self._throughput, strategy, size))

    def _bandwidth(self, size: int, deadline: Deadline) -> list[Result]:
        num_bytes = 2**20 if self._is_small else 2**28
        speed = self._launchers[size].run(deadline, "ddp", all_reduce, num_bytes)
        return [Figure(f"all-reduce, {size} processes", "GB/s", [speed / 1e9])]

    def _throughput(self, strategy: str, size: int, deadline: Deadline) -> list[Result]:
        config, words = config_of(JOBS[JOB], self._is_small)
        words.append(f"--batch.global_batch_size={config.batch.global_batch_size * size}")
        options = self._launchers[size].options(strategy, deadline)
        with (
            tempfile.TemporaryDirectory() as folder,
            contender(start_job(ours, words, Path(folder, "run"), **options), size) as job,
        ):
            samples = [size * units_of_step(JOBS[JOB], config) / job.turn() for _ in range(TURNS)]
        median = sorted(samples)[TURNS // 2]
        results: list[Result] = [Figure(f"{strategy}, {size} processes", f"{JOBS[JOB].unit}/s", samples)]
        if size == 1:
            self._alone[strategy] = median
        elif strategy in self._alone:
            efficiency = median / size / self._alone[strategy]
            results.append(Figure(f"{strategy}, {size} processes: of {size} times one", "", [efficiency]))
        return results


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows; one GPU has nothing to scale to."""
    if gpus.count == 1:

        def refuse(_: float) -> list[Result]:
            raise NotMeasured("this machine has one GPU")

        part.measure([Row("scaling", refuse)])
        return
    sizes = [size for size in SIZES if size <= (gpus.count or 2)]
    part.measure(Scaling(sizes, is_small=gpus.count == 0).rows())
