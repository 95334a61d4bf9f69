"""The time of an optimizer step, from what it computes and sends; sizes are in bytes, times in seconds.

A collective takes a latency for each call and hop, and a time for each byte (Thakur, Rabenseifner & Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"). Hops within a node and between nodes are counted
apart, as NCCL does to choose its algorithms (`ncclTopoTuneModel` in NCCL's src/graph/tuning.cc).

A forward or backward pass takes as long as the longer of computing and communicating, plus the share of the shorter
that is not hidden behind it. That share is the model's only fitted constant: see bench/results/scale/README.md, which
compares the model with published figures.

Not modeled: slow processes, congestion, waiting for data, the optimizer's update, checkpoints.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from largebatch.plan.traffic import Collective, Group, Traffic

MFU = (0.3, 0.5)
"""What computing is assumed to reach of a GPU's peak: low and high. Transformers reached 0.36 to 0.58 at
the smallest sizes of bench/scale's series. Convolutions reach less, and so take longer than the model says."""
EXPOSED_SHARE = (0.4, 1.0)
"""The share of the shorter of computing and communicating that is not hidden: low and high. 0.56 is fitted in
bench/scale; its other series, each alone, fit best with 0.34 to 1, except for one, with 0.11."""


@dataclass(frozen=True)
class Fabric:
    """What connects the GPUs; bandwidths are in bytes per second and direction."""

    gpus_per_node: int
    node_bandwidth: float  # of a GPU to the others of its node
    net_bandwidth: float  # a GPU's share of its node's network
    # NCCL, src/graph/tuning.cc: `baseLatencies` and `hwLatencies` of Ring with the protocol Simple. Its tree has 4.0 us
    # within a node, for which 3.4 stands here, too.
    call_latency: float = 8.4e-6  # of a collective, however many take part
    node_latency: float = 3.4e-6  # of a hop within a node
    net_latency: float = 14e-6  # of a hop between nodes


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind."""

    peak: float  # floating-point operations per second of a GPU in the precision of training, by its data sheet
    fabric: Fabric


@dataclass(frozen=True)
class Computing:
    """Seconds of one micro-batch on a GPU without any communication."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and the share of them that computing alone would take: each least and most."""

    seconds: tuple[float, float]
    efficiency: tuple[float, float]


def step_time(traffic: Traffic, flops: tuple[int, int], micro_batches: int, hardware: Hardware) -> StepTime:
    """The time of a step under the assumptions `MFU` and `EXPOSED_SHARE`.

    Args:
        traffic: What it sends.
        flops: Floating-point operations of a micro-batch: forward and backward.
        micro_batches: Micro-batches of each process.
        hardware: The GPUs.
    """
    speeds = [mfu * hardware.peak for mfu in MFU]
    computed = [Computing(flops[0] / speed, flops[1] / speed) for speed in speeds]
    least, most = (
        [step_seconds(collectives, each, micro_batches, hardware.fabric, share) for each in computed]
        for collectives, share in zip((traffic.least, traffic.most), EXPOSED_SHARE, strict=True)
    )
    alone = [micro_batches * each.both for each in computed]
    slow, fast = range(2)
    return StepTime((least[fast], most[slow]), (alone[fast] / most[fast], alone[slow] / least[slow]))


def step_seconds(
    collectives: Iterable[Collective], computing: Computing, micro_batches: int, fabric: Fabric, exposed_share: float
) -> float:
    """The time of an optimizer step with these collectives; see `overlapped` for the exposed share."""
    # What each micro-batch communicates in a pass, and what the last one adds.
    each, last = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    step = 0.0
    for collective in collectives:
        seconds = collective_seconds(collective, fabric)
        if collective.phase == "update":
            step += collective.times * seconds
        else:
            with_each, with_last = divmod(collective.times, micro_batches)
            each[collective.phase] += with_each * seconds
            last[collective.phase] += with_last * seconds
    for phase, seconds in (("forward", computing.forward), ("backward", computing.backward)):
        step += (micro_batches - 1) * overlapped(seconds, each[phase], exposed_share)
        step += overlapped(seconds, each[phase] + last[phase], exposed_share)
    return step


def overlapped(computing: float, communicating: float, exposed_share: float) -> float:
    """Time of computing and communicating at once, of which a share of the shorter is not hidden behind the longer.

    0 is the longer of the two, 1 is one after the other. It is positive because collectives take multiprocessors and
    memory bandwidth from what is computed meanwhile, and because the first has nothing to hide behind.
    """
    return max(computing, communicating) + exposed_share * min(computing, communicating)


def collective_seconds(collective: Collective, fabric: Fabric) -> float:
    """The time of all calls of a collective, once."""
    size = collective.size / collective.calls
    if collective.operation == "all-reduce":
        # NCCL also chooses the faster one.
        return collective.calls * min(ring(size, collective.group, fabric, 2), tree(size, collective.group, fabric))
    return collective.calls * ring(size, collective.group, fabric, 1)


def ring(size: float, group: Group, fabric: Fabric, passes: int) -> float:
    """An all-gather or a reduce-scatter (one pass), or both, which is an all-reduce (two).

    A pass takes n - 1 hops of size / n bytes (Thakur et al., sections 4.1 and 4.2); one hop less than there are nodes
    is between nodes (NCCL's `nInterSteps`).
    """
    if group.size == 1:
        return 0.0
    hops, net_hops = group.size - 1, _nodes(group, fabric) - 1
    latency = (hops - net_hops) * fabric.node_latency + net_hops * fabric.net_latency
    return fabric.call_latency + passes * (latency + hops / group.size * size / _bandwidth(group, fabric))


def tree(size: float, group: Group, fabric: Fabric) -> float:
    """An all-reduce up and down a binary tree of nodes, a chain in each: fewer hops than a ring, and all bytes twice.

    NCCL's tree, whose formula this is, sends as much as its ring does, because it is two trees of half the bytes each.
    """
    if group.size == 1:
        return 0.0
    hops, net_hops = group.on_a_node(fabric.gpus_per_node) - 1, math.ceil(math.log2(_nodes(group, fabric)))
    latency = hops * fabric.node_latency + net_hops * fabric.net_latency
    return fabric.call_latency + 2 * (latency + size / _bandwidth(group, fabric))


def _nodes(group: Group, fabric: Fabric) -> int:
    return math.ceil(group.size / group.on_a_node(fabric.gpus_per_node))


def _bandwidth(group: Group, fabric: Fabric) -> float:
    """Of the narrowest place in a ring; what leaves a node does so by the network shares of its members there."""
    if _nodes(group, fabric) == 1:
        return fabric.node_bandwidth
    return min(fabric.node_bandwidth, group.on_a_node(fabric.gpus_per_node) * fabric.net_bandwidth)
