"""Time of an optimizer step on many GPUs, by arithmetic alone: collectives, what each strategy sends, and overlap.

Sizes are in bytes, times in seconds. A collective costs a latency for each hop (alpha) and a time for each byte (beta,
one over the bandwidth): Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in
MPICH". Hops within a node and between nodes are counted apart, as NCCL does to choose its algorithms
(`ncclTopoTuneModel` in NCCL's src/graph/tuning.cc).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# A backward pass costs two forward passes: gradients by the inputs, and by the weights.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Fabric:
    """What connects the GPUs. Bandwidths are of one GPU in one direction, in bytes a second."""

    gpus_per_node: int
    call_latency: float
    """Of a collective, however many take part."""
    node_latency: float
    """Of a hop within a node."""
    net_latency: float
    """Of a hop between nodes."""
    node_bandwidth: float
    net_bandwidth: float
    """One GPU's share of its node's network."""


@dataclass(frozen=True)
class Group:
    """Who takes part in a collective: `local` GPUs on each of `nodes` nodes."""

    local: int
    nodes: int

    @property
    def size(self) -> int:
        return self.local * self.nodes

    def bandwidth(self, fabric: Fabric) -> float:
        """Of the narrowest place in a ring; what leaves a node does so by the network shares of all its members."""
        if self.nodes == 1:
            return fabric.node_bandwidth
        return min(fabric.node_bandwidth, self.local * fabric.net_bandwidth)


def everyone(gpus: int, fabric: Fabric) -> Group:
    """All GPUs of a job.

    Raises:
        ValueError: They do not fill whole nodes.
    """
    local = min(gpus, fabric.gpus_per_node)
    if gpus % local:
        raise ValueError(
            f"{gpus} GPUs do not fill nodes of {fabric.gpus_per_node}: "
            f"give a multiple of {fabric.gpus_per_node}, or fewer than {fabric.gpus_per_node}"
        )
    return Group(local, gpus // local)


Collective = Callable[[float, Group, Fabric], float]
"""Seconds of one call, by the bytes of the whole tensor, who takes part, and on what."""


def ring(size: float, group: Group, fabric: Fabric, passes: int = 1) -> float:
    """An all-gather or a reduce-scatter (one pass), or both, which is an all-reduce (two).

    A pass takes n - 1 hops of size / n bytes (Thakur et al., sections 4.1 and 4.2); one hop less than there are nodes
    is between nodes (NCCL's `nInterSteps`).
    """
    if group.size == 1:
        return 0.0
    hops, net_hops = group.size - 1, group.nodes - 1
    latency = (hops - net_hops) * fabric.node_latency + net_hops * fabric.net_latency
    return fabric.call_latency + passes * (latency + hops / group.size * size / group.bandwidth(fabric))


def tree_all_reduce(size: float, group: Group, fabric: Fabric) -> float:
    """An all-reduce up and down a binary tree of nodes, a chain in each: fewer hops than a ring, and all bytes twice.

    NCCL's tree, whose formula this is, sends as much as its ring does, because it is two trees of half the bytes each.
    """
    if group.size == 1:
        return 0.0
    latency = (group.local - 1) * fabric.node_latency + math.ceil(math.log2(group.nodes)) * fabric.net_latency
    return fabric.call_latency + 2 * (latency + size / group.bandwidth(fabric))


def all_reduce(size: float, group: Group, fabric: Fabric) -> float:
    """The faster of ring and tree, which is how NCCL chooses."""
    return min(ring(size, group, fabric, passes=2), tree_all_reduce(size, group, fabric))


def three_phase_all_reduce(size: float, group: Group, fabric: Fabric) -> float:
    """Goyal et al. 2017, section 4: a reduction in each node, an all-reduce between nodes, a broadcast in each node.

    Between nodes by recursive halving and doubling: 2 log2(nodes) hops, 2 (nodes - 1) / nodes of the bytes (Thakur et
    al., section 4.5). Within, pieces follow one another along a chain.
    """
    within = 0.0
    if group.local > 1:
        within = 2 * ((group.local - 1) * fabric.node_latency + size / fabric.node_bandwidth)
    if group.nodes == 1:
        return within
    hops = 2 * math.ceil(math.log2(group.nodes))
    sent = 2 * (group.nodes - 1) / group.nodes * size
    return within + hops * fabric.net_latency + sent / (group.local * fabric.net_bandwidth)


@dataclass(frozen=True)
class Job:
    """What is trained, and how, as far as communication depends on it."""

    strategy: str
    """A key of `STRATEGIES`."""
    params: float
    units: int
    """Pieces that a sharded model is gathered in: its layers, and one for the rest."""
    micro_batches: int = 1
    """For each GPU in an optimizer step."""
    gather_bytes: float = 4
    """Of an element of the weights when they are gathered."""
    reduce_bytes: float = 4
    """Of an element of the gradients when they are reduced."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: `calls` of them, for `size` bytes together."""

    collective: Collective
    size: float
    calls: int
    phase: Literal["forward", "backward", "update"]
    """What the GPU computes meanwhile; nothing in the update."""
    last_only: bool = False
    """With the last micro-batch of a step only, or with each."""
    among: Literal["all", "node", "across"] = "all"
    """All GPUs; those of a node; or those at the same place in each node."""

    def seconds(self, gpus: int, fabric: Fabric) -> float:
        group = everyone(gpus, fabric)
        if self.among == "node":
            group = Group(group.local, 1)
        elif self.among == "across":
            group = Group(1, group.nodes)
        return self.calls * self.collective(self.size / self.calls, group, fabric)


def _ddp(job: Job, _: Fabric) -> list[Traffic]:
    """Gradients once a step, in torch's buckets of 25 MiB."""
    size = job.reduce_bytes * job.params
    return [Traffic(all_reduce, size, math.ceil(size / (25 * 2**20)), "backward", last_only=True)]


def _goyal(job: Job, _: Fabric) -> list[Traffic]:
    """Gradients once a step, each parameter's by itself."""
    return [Traffic(three_phase_all_reduce, job.reduce_bytes * job.params, job.units, "backward", last_only=True)]


def _zero_1_or_2(job: Job, last_only: bool) -> list[Traffic]:
    """Gradients in buckets of 5e8 elements; weights after the update, a call for each of two parameter groups.

    The ZeRO paper (Rajbhandari et al. 2020, section 7) scatters gradients: with the gathering, 2 times the parameters.
    DeepSpeed 0.19.8 all-reduces its buckets and keeps a part (`allreduce_and_scatter`): 3 times.
    """
    reduced = Traffic(
        all_reduce, job.reduce_bytes * job.params, math.ceil(job.params / 5e8), "backward", last_only=last_only
    )
    return [reduced, Traffic(ring, job.gather_bytes * job.params, 2, "update")]


def _sharded(job: Job, *, gathers_in_backward: bool = True, reduces_last_only: bool = False) -> list[Traffic]:
    """Weights unit by unit with each micro-batch; gradients scattered, as often as the strategy does."""
    gather = Traffic(ring, job.gather_bytes * job.params, job.units, "forward")
    again = Traffic(ring, job.gather_bytes * job.params, job.units, "backward")
    scatter = Traffic(ring, job.reduce_bytes * job.params, job.units, "backward", last_only=reduces_last_only)
    return [gather, again, scatter] if gathers_in_backward else [gather, scatter]


def _zero_3(job: Job) -> list[Traffic]:
    """Weights in prefetches of 5e7 elements, and gradients in buckets of 5e8, with each micro-batch."""
    calls = math.ceil(job.params / 5e7)
    return [
        Traffic(ring, job.gather_bytes * job.params, calls, "forward"),
        Traffic(ring, job.gather_bytes * job.params, calls, "backward"),
        Traffic(ring, job.reduce_bytes * job.params, math.ceil(job.params / 5e8), "backward"),
    ]


def _hsdp(job: Job, fabric: Fabric) -> list[Traffic]:
    """FSDP2 within each node; a node's shards of the gradients are then summed over the nodes."""
    return [
        Traffic(ring, job.gather_bytes * job.params, job.units, "forward", among="node"),
        Traffic(ring, job.gather_bytes * job.params, job.units, "backward", among="node"),
        Traffic(ring, job.reduce_bytes * job.params, job.units, "backward", last_only=True, among="node"),
        Traffic(
            all_reduce,
            job.reduce_bytes * job.params / fabric.gpus_per_node,
            job.units,
            "backward",
            last_only=True,
            among="across",
        ),
    ]


STRATEGIES: dict[str, Callable[[Job, Fabric], list[Traffic]]] = {
    "ddp": _ddp,
    "zero1": lambda job, _: _zero_1_or_2(job, last_only=True),
    "zero2": lambda job, _: _zero_1_or_2(job, last_only=False),
    "fsdp2": lambda job, _: _sharded(job, reduces_last_only=True),
    "hsdp": _hsdp,
    "zero3": lambda job, _: _zero_3(job),
    # Of published figures only.
    "full_shard": lambda job, _: _sharded(job),
    "shard_grad_op": lambda job, _: _sharded(job, gathers_in_backward=False),
    "goyal": _goyal,
}


def overlapped(computing: float, communicating: float, exposed_share: float) -> float:
    """Time of computing and communicating at once, of which a share of the shorter is not hidden behind the longer.

    0 is the longer of the two, 1 is one after the other. It is positive because collectives take multiprocessors and
    memory bandwidth from what is computed meanwhile, and because the first has nothing to hide behind.
    """
    return max(computing, communicating) + exposed_share * min(computing, communicating)


def step_seconds(computing: float, job: Job, gpus: int, fabric: Fabric, exposed_share: float) -> float:
    """Time of an optimizer step.

    Args:
        computing: Seconds of one micro-batch, forward and backward, on a GPU without any communication.
        job: What is trained.
        gpus: How many.
        fabric: What connects them.
        exposed_share: See `overlapped`.
    """
    traffic = STRATEGIES[job.strategy](job, fabric)
    step = sum(each.seconds(gpus, fabric) for each in traffic if each.phase == "update")
    for index in range(job.micro_batches):
        is_last = index == job.micro_batches - 1
        for phase, share in (("forward", FORWARD_SHARE), ("backward", 1 - FORWARD_SHARE)):
            sent = [each for each in traffic if each.phase == phase and (is_last or not each.last_only)]
            communicating = sum(each.seconds(gpus, fabric) for each in sent)
            step += overlapped(share * computing, communicating, exposed_share)
    return step


def computing_seconds(step: float, job: Job, gpus: int, fabric: Fabric, exposed_share: float) -> float:
    """The inverse of `step_seconds`: computing of a micro-batch, from the time of a step that was measured.

    Raises:
        ValueError: Communication alone would take longer than the step did.
    """
    if step_seconds(0.0, job, gpus, fabric, exposed_share) > step:
        raise ValueError(f"{job} on {gpus} GPUs communicates for longer than a step of {step:g} s")
    low, high = 0.0, step
    for _ in range(100):
        middle = (low + high) / 2
        if step_seconds(middle, job, gpus, fabric, exposed_share) < step:
            low = middle
        else:
            high = middle
    return high


def state_bytes(job: Job, gpus: int, fabric: Fabric) -> float:
    """Weights, gradients and Adam's two moments, all fp32, on one GPU; activations come on top.

    ZeRO paper, section 3.1, with this project's accumulation: FSDP2 keeps whole gradients until the last micro-batch.
    """
    shards = min(gpus, fabric.gpus_per_node) if job.strategy == "hsdp" else gpus
    whole = {"ddp": 16, "zero1": 8, "zero2": 4, "zero3": 0}.get(job.strategy, 4 if job.micro_batches > 1 else 0)
    return (whole + (16 - whole) / shards) * job.params
