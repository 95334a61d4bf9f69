"""The bandwidth of an all-reduce over all nodes of a job."""

import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from largebatch.tools.local_jobs.jobs import INTERFACES, JobFailed, run_job
from largebatch.tools.preflight.reports import Node, Report, Severity
from largebatch.words import counted

SECONDS = 120.0  # how long the processes may take to start, meet and measure
MEBIBYTES_ON_GPUS = 1024
MEBIBYTES_ON_CPUS = 64
NUM_MEASUREMENTS = 5


def measure(node: Node) -> Report:
    """Take part with the processes of this node, whose output is kept; the first node reports the bandwidth."""
    mebibytes = MEBIBYTES_ON_GPUS if node.gpus else MEBIBYTES_ON_CPUS
    backend = "nccl" if node.gpus else "gloo"
    what = (
        f"all-reduce of {mebibytes} MiB over {counted(node.num_nodes, 'node')} by {backend}, "
        f"{counted(node.processes, 'process')} per node"
    )
    logs = node.folder / f"all_reduce_{node.name}"
    logs.mkdir(exist_ok=True)
    environment = {"WORLD_SIZE": str(node.num_nodes * node.processes)}
    if node.num_nodes > 1:
        # The first process of all opens the store at which they meet.
        environment |= {name: os.environ.get(name, "") for name in INTERFACES}
        environment |= {
            "MASTER_ADDR": node.host,
            "MASTER_PORT": str(node.port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    try:
        bandwidth = run_job(
            _bandwidth,
            node,
            backend,
            mebibytes,
            world_size=node.processes,
            environment=environment,
            timeout=SECONDS,
            logs=logs,
        )[0]
    except JobFailed as failure:
        findings = {f"{what}: {failure.in_one_line()}": Severity.REFUSED}
        return Report(node.name, findings, failed_at=time.time())
    if node.rank > 0:
        return Report(node.name)
    result = f"{what}: {bandwidth:.2f} GB/s (bus bandwidth, median of {NUM_MEASUREMENTS})"
    if bandwidth >= node.min_busbw:
        return Report(node.name, {result: Severity.NOTE})
    too_slow = f"{result}, less than LARGEBATCH_MIN_BUSBW={node.min_busbw:g}; see docs/slurm.md"
    return Report(node.name, {too_slow: Severity.REFUSED})


def _bandwidth(node: Node, backend: str, mebibytes: int) -> float:
    """In one process, what each process sends per second in GB/s, whatever their number."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if node.gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    rank = node.rank * node.processes + local_rank
    world_size = node.num_nodes * node.processes
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS))
    tensor = torch.ones(mebibytes * 2**20 // 4, device=device)
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
