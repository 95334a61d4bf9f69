"""One process of the pre-flight's all-reduce, on one GPU: `python -m largebatch.tools.preflight.all_reduce`.

It ends when the process that started it ends, because that closes its standard input.
"""

import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from largebatch.errors import reason_of

TIMES = 5


@dataclass(frozen=True)
class AllReduce:
    """Which all-reduce to take part in, and as what; as JSON it is the command line."""

    host: str  # of the store
    port: int
    label: str  # different for each measurement
    node: str
    rank: int
    world_size: int
    gpu: int  # -1 for the CPU
    mebibytes: int
    seconds: float


def take_part(it: AllReduce) -> None:
    """Measure, and put the result of rank 0, or why this process failed, into the store."""
    store = TCPStore(it.host, it.port, wait_for_workers=False, timeout=timedelta(seconds=it.seconds))
    try:
        speed = _speed(it, PrefixStore(f"{it.label}/group", store))
    except Exception as error:
        say_why(store, it, reason_of(error), died=False)
        raise
    if it.rank == 0:
        store.set(f"{it.label}/speed", str(speed))


def say_why(store: TCPStore, it: AllReduce, reason: str, died: bool) -> None:
    """Put into the store why an all-reduce failed. The first reason counts, unless a process died: then that does."""
    order = 0 if died else store.add(f"{it.label}/failures", 1)
    store.set(f"{it.label}/failure {order}", f"rank {it.rank} on {it.node}: {reason}")
    store.set(f"{it.label}/failed", "")


def why(store: TCPStore, label: str) -> str:
    """Why the all-reduce failed; empty if it did not."""
    keys = [f"{label}/failure {order}" for order in (0, 1)]
    return next((str(store.get(key).decode()) for key in keys if store.check([key])), "")


def _speed(it: AllReduce, store: Store) -> float:
    """The bus bandwidth in GB/s: what each process sends, whatever their number; the median of several measurements."""
    backend, device = ("gloo", torch.device("cpu")) if it.gpu < 0 else ("nccl", torch.device("cuda", it.gpu))
    if it.gpu >= 0:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=it.seconds)
    dist.init_process_group(backend, store=store, rank=it.rank, world_size=it.world_size, timeout=timeout)
    tensor = torch.ones(it.mebibytes * 2**20 // 4, device=device)
    seconds = []
    # The first one sets up connections.
    for _ in range(1 + TIMES):
        tensor.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        total = float(tensor[-1])
        seconds.append(time.perf_counter() - began)
        if total != it.world_size:
            raise RuntimeError(f"the sum of {it.world_size} ones came out as {total}")
    dist.destroy_process_group()
    moved = 2 * (it.world_size - 1) / it.world_size * tensor.nbytes
    return moved / statistics.median(seconds[1:]) / 1e9


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    take_part(AllReduce(**json.loads(sys.argv[1])))
