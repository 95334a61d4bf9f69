"""Starts the processes of the all-reduce on a node, and finds the slow nodes of a job by measuring some of them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from largebatch.tools.preflight.all_reduce import AllReduce, say_why
from largebatch.tools.preflight.meeting import Job

SECONDS = 120.0  # how long the processes may take to start, meet and measure
SECONDS_AFTER_A_FAILURE = 10.0  # how long the other processes have to say why they failed, too
MEBIBYTES_ON_GPUS, MEBIBYTES_ON_CPUS = 1024, 64

Groups = list[list[int]]


def search(nodes: int, has_several_processes: bool, minimum: float) -> Generator[Groups, Sequence[float], list[int]]:
    """Find the slow nodes of a job whose all-reduce over all nodes is slow or fails.

    First each node is measured alone, then pairs of neighbors in two ways: a node in a fast pair is fast. The others
    are then paired with fast ones.

    Args:
        nodes: The number of nodes.
        has_several_processes: Whether a node alone can be measured.
        minimum: GB/s of a fast group, if it does not fail.

    Yields:
        Groups of nodes to measure at the same time. The caller sends their GB/s, 0 for a failure.

    Returns:
        The slow nodes, as far as they can be told from the others.
    """

    def fast(speed: float) -> bool:
        return speed > 0 and speed >= minimum

    slow: set[int] = set()
    if has_several_processes and nodes > 1:
        speeds = yield [[node] for node in range(nodes)]
        slow |= {node for node, speed in enumerate(speeds) if not fast(speed)}
    rest = [node for node in range(nodes) if node not in slow]
    known: set[int] = set()
    if len(rest) > 2:
        # Neighbors in a circle; if the number of nodes is odd, a third way is needed to pair all of them.
        for start in (0, 1, len(rest) - 1) if len(rest) % 2 else (0, 1):
            circle = rest[start:] + rest[:start]
            pairs = [circle[index : index + 2] for index in range(0, len(circle) - 1, 2)]
            speeds = yield pairs
            known |= {node for pair, speed in zip(pairs, speeds, strict=True) if fast(speed) for node in pair}
    suspects = [node for node in rest if node not in known]
    while known and suspects:
        pairs = [list(pair) for pair in zip(suspects, sorted(known), strict=False)]
        suspects = suspects[len(pairs) :]
        speeds = yield pairs
        slow |= {pair[0] for pair, speed in zip(pairs, speeds, strict=True) if not fast(speed)}
    return sorted(slow) if len(slow) < nodes else []


def processes_of_a_node(job: Job) -> int:
    """Processes of the all-reduce: one per GPU, or one on CPUs."""
    return job.gpus or 1


def mebibytes(job: Job) -> int:
    """The size of the tensor."""
    return MEBIBYTES_ON_GPUS if job.gpus else MEBIBYTES_ON_CPUS


def measure(job: Job, store: TCPStore, label: str, group: Sequence[int]) -> None:
    """Take part with this node in an all-reduce of a group of nodes; the results are in the store."""
    count = processes_of_a_node(job)
    first = group.index(job.rank) * count
    processes = {}
    for index in range(count):
        it = AllReduce(
            host=store.host,
            port=store.port,
            label=label,
            node=job.node,
            rank=first + index,
            world_size=len(group) * count,
            gpu=index if job.gpus else -1,
            mebibytes=mebibytes(job),
            seconds=SECONDS,
        )
        processes[it] = start(job, it)
    deadline = time.monotonic() + SECONDS
    has_failed = False
    try:
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < deadline:
            if not has_failed and (store.check([f"{label}/failed"]) or any(p.returncode for p in processes.values())):
                has_failed = True
                deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
            time.sleep(0.2)
        for it, process in processes.items():
            code = process.returncode
            if code is not None and code < 0:
                say_why(store, it, f"ended by {signal.Signals(-code).name}", died=True)
            elif code or (code is None and not has_failed):
                reason = "no result" if code is None else f"exit code {code}"
                say_why(store, it, f"{reason}; see {_log(job, it)}", died=False)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def start(job: Job, it: AllReduce) -> "subprocess.Popen[bytes]":
    """Start a process; it ends when its standard input is closed, however this process ends."""
    command = [sys.executable, "-m", "largebatch.tools.preflight.all_reduce", json.dumps(asdict(it))]
    with _log(job, it).open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _log(job: Job, it: AllReduce) -> Path:
    return job.folder / f"all_reduce_{it.node}_{max(it.gpu, 0)}.log"
