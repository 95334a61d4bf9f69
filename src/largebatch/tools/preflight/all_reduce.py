"""The bandwidth of an all-reduce within a node, or over all nodes of a job."""

import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from largebatch.tools.local_jobs.jobs import INTERFACES, run_job
from largebatch.tools.preflight.meeting import Node
from largebatch.words import counted

SECONDS = 120.0  # how long the processes may take to start, meet and measure
MEBIBYTES_ON_GPUS, MEBIBYTES_ON_CPUS = 1024, 64
NUM_MEASUREMENTS = 5


def in_words(node: Node) -> str:
    """The all-reduce that is measured."""
    return (
        f"all-reduce of {_mebibytes(node)} MiB over {counted(node.num_nodes, 'node')} by {_backend(node)}, "
        f"{counted(node.processes, 'process', 'processes')} per node"
    )


def _backend(node: Node) -> str:
    return "nccl" if node.gpus else "gloo"


def _mebibytes(node: Node) -> int:
    return MEBIBYTES_ON_GPUS if node.gpus else MEBIBYTES_ON_CPUS


def measure(node: Node, store: TCPStore, logs: Path) -> float:
    """Take part with the processes of this node, which meet at the store; their output goes to the folder `logs`.

    Returns:
        The bus bandwidth in GB/s.

    Raises:
        JobFailed: A process of this node failed, or did not end in time.
    """
    logs.mkdir(exist_ok=True)
    environment = {"WORLD_SIZE": str(node.processes)}
    if node.num_nodes > 1:
        environment |= {name: os.environ.get(name, "") for name in INTERFACES}
    results: list[float] = run_job(
        _bandwidth,
        node,
        store.host,
        store.port,
        world_size=node.processes,
        environment=environment,
        folder=Path.cwd(),
        timeout=SECONDS,
        logs=logs,
    )
    return results[0]


def _bandwidth(node: Node, host: str, port: int) -> float:
    """In one process, what each process sends per second, whatever their number; the median of several measurements."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if node.gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=SECONDS)
    store = PrefixStore("all-reduce", TCPStore(host, port, wait_for_workers=False, timeout=timeout))
    rank, world_size = node.rank * node.processes + local_rank, node.num_nodes * node.processes
    dist.init_process_group(_backend(node), store=store, rank=rank, world_size=world_size, timeout=timeout)
    tensor = torch.ones(_mebibytes(node) * 2**20 // 4, device=device)
    seconds = []
    # The first one sets up connections.
    for _ in range(1 + NUM_MEASUREMENTS):
        tensor.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        total = float(tensor[-1])
        seconds.append(time.perf_counter() - began)
        if total != world_size:
            raise RuntimeError(f"the sum of {world_size} ones came out as {total}")
    dist.destroy_process_group()
    moved = 2 * (world_size - 1) / world_size * tensor.nbytes
    return moved / statistics.median(seconds[1:]) / 1e9
