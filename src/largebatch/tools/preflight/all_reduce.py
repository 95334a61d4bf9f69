"""The bandwidth of an all-reduce within a node, or over all nodes of a job."""

import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from largebatch.tools.local_jobs.jobs import INTERFACES, run_job
from largebatch.tools.preflight.reports import Node
from largebatch.words import counted

SECONDS = 120.0  # how long the processes may take to start, meet and measure
MEBIBYTES_ON_GPUS = 1024
MEBIBYTES_ON_CPUS = 64
NUM_MEASUREMENTS = 5


def describe_all_reduce(node: Node) -> str:
    """What is measured, with its size and the number of processes."""
    return (
        f"all-reduce of {_mebibytes(node)} MiB over {counted(node.num_nodes, 'node')} by {_backend(node)}, "
        f"{counted(node.processes, 'process', 'processes')} per node"
    )


def _backend(node: Node) -> str:
    return "nccl" if node.gpus else "gloo"


def _mebibytes(node: Node) -> int:
    return MEBIBYTES_ON_GPUS if node.gpus else MEBIBYTES_ON_CPUS


def measure(node: Node, logs: Path) -> float:
    """Take part with the processes of this node; their output goes to the folder `logs`.

    Returns:
        The bus bandwidth in GB/s.

    Raises:
        JobFailed: A process of this node failed, or did not end in time.
    """
    logs.mkdir(exist_ok=True)
    environment = {"WORLD_SIZE": str(node.num_nodes * node.processes)}
    if node.num_nodes > 1:
        # The first process of all opens the store at which they meet.
        environment |= {"MASTER_ADDR": node.host, "MASTER_PORT": str(node.port)}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        environment |= {name: os.environ.get(name, "") for name in INTERFACES}
    results: list[float] = run_job(
        _bandwidth,
        node,
        world_size=node.processes,
        environment=environment,
        folder=Path.cwd(),
        timeout=SECONDS,
        logs=logs,
    )
    return results[0]


def _bandwidth(node: Node) -> float:
    """In one process, what each process sends per second, whatever their number; the median of several measurements."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if node.gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    rank = node.rank * node.processes + local_rank
    world_size = node.num_nodes * node.processes
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group(_backend(node), rank=rank, world_size=world_size, timeout=timeout)
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
    # The store ends with the first process.
    dist.barrier()
    dist.destroy_process_group()
    moved = 2 * (world_size - 1) / world_size * tensor.nbytes
    return moved / statistics.median(seconds[1:]) / 1e9
