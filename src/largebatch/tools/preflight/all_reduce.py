"""The bandwidth of an all-reduce within a node, or over all nodes of a job."""

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from largebatch.errors import counted
from largebatch.tools.verify.jobs import INTERFACES, run_job

SECONDS = 120.0  # how long the processes may take to start, meet and measure
MEBIBYTES_ON_GPUS, MEBIBYTES_ON_CPUS = 1024, 64
NUM_MEASUREMENTS = 5


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce by the same number of processes on each of some nodes, and where they meet."""

    host: str  # of a store
    port: int
    num_nodes: int
    node_rank: int  # of this node among them
    processes_per_node: int
    on_gpus: bool

    def __str__(self) -> str:
        return (
            f"all-reduce of {self.mebibytes} MiB over {counted(self.num_nodes, 'node')} by {self.backend}, "
            f"{counted(self.processes_per_node, 'process', 'processes')} per node"
        )

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpus else "gloo"

    @property
    def mebibytes(self) -> int:
        """The size of the tensor."""
        return MEBIBYTES_ON_GPUS if self.on_gpus else MEBIBYTES_ON_CPUS


def measure(it: AllReduce, logs: Path) -> float:
    """Take part with the processes of this node; their output goes to the folder `logs`.

    Returns:
        The bus bandwidth in GB/s.

    Raises:
        JobFailed: A process of this node failed, or did not end in time.
    """
    logs.mkdir(exist_ok=True)
    environment = {"WORLD_SIZE": str(it.processes_per_node)}
    if it.num_nodes > 1:
        environment |= {name: os.environ.get(name, "") for name in INTERFACES}
    results: list[float] = run_job(
        _bandwidth,
        it,
        world_size=it.processes_per_node,
        environment=environment,
        folder=Path.cwd(),
        timeout=SECONDS,
        logs=logs,
    )
    return results[0]


def _bandwidth(it: AllReduce) -> float:
    """In one process, what each process sends per second, whatever their number; the median of several measurements."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if it.on_gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=SECONDS)
    store = PrefixStore("all-reduce", TCPStore(it.host, it.port, wait_for_workers=False, timeout=timeout))
    rank, world_size = it.node_rank * it.processes_per_node + local_rank, it.num_nodes * it.processes_per_node
    dist.init_process_group(it.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    tensor = torch.ones(it.mebibytes * 2**20 // 4, device=device)
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
