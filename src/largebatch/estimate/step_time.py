"""The time of an optimizer step, from what it computes and sends; sizes are in bytes, times in seconds.

A collective costs a latency for each call and hop, and a time for each byte (Thakur, Rabenseifner & Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"). Hops within a node and between nodes are counted
separately, as NCCL does to choose its algorithms (`ncclTopoTuneModel` in NCCL's src/graph/tuning.cc).

A forward or backward pass takes as long as the longer of computation and communication, plus the share of the
shorter that is not hidden behind it. That share is the model's only fitted constant; bench/results/scale/README.md
compares the model with published figures.

Of the optimizer's update, only matrix products are counted (Muon's), which nothing hides.

Not modeled: the similarities of a loss that couples samples, slow processes, congestion, waiting for data, the rest of
the optimizer's update, checkpoints.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.estimate.traffic import Collective, Group

MFU = (0.3, 0.5)
"""The fraction of a GPU's peak that computation is assumed to reach: low and high. Transformers reached 0.36 to 0.58 on
the fewest GPUs of each series in bench/scale."""
CONVOLUTION_PASSES = (19, 17)
"""How often the activations that a network of convolutions keeps cross the interface of the GPU's memory in a
micro-batch, at the bandwidth of its data sheet: high and low. Convolutions with normalization wait for memory, so they
take at least this long. NVIDIA's PyTorch example trains ResNet-50 in mixed precision with 1,200 images/s on a V100 of
16 GB, 1,156 on one of 32 GB and 2,470 on an A100 of 80 GB (NVIDIA/DeepLearningExamples,
PyTorch/Classification/ConvNets/resnet50v1.5): 750, 779 and 826 MB per image, 17 to 18.7 times the 44.2 MB that are
kept."""
EXPOSED_SHARE = (0.4, 1.0)
"""The share of the shorter of computation and communication that is not hidden: low and high. bench/scale fits 0.56;
its other series, each fitted alone, give 0.34 to 1, except for one, which gives 0.11."""


@dataclass(frozen=True)
class Fabric:
    """What connects the GPUs; bandwidths are in bytes per second and direction."""

    gpus_per_node: int
    node_bandwidth: float  # from a GPU to the others of its node
    net_bandwidth: float  # a GPU's share of its node's network
    # NCCL, src/graph/tuning.cc: `baseLatencies` and `hwLatencies` of Ring with the protocol Simple. Its tree has 4.0 us
    # within a node; 3.4 is used for both.
    call_latency: float = 8.4e-6  # per collective, however many processes take part
    node_latency: float = 3.4e-6  # per hop within a node
    net_latency: float = 14e-6  # per hop between nodes


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind."""

    peak: float  # floating-point operations per second of a GPU in the precision of training, by its data sheet
    bf16_peak: float  # the same in bf16
    fabric: Fabric
    memory_bandwidth: float | None = None  # bytes per second of its memory if the model is one of convolutions


def step_time(
    traffic: Sequence[Collective],
    flops: tuple[int, int],
    micro_batches: int,
    hardware: Hardware,
    kept: int = 0,
    products: int = 0,
) -> dict[str, float]:
    """The least and the most seconds of a step, under the assumptions `MFU`, `CONVOLUTION_PASSES` and `EXPOSED_SHARE`.

    Args:
        traffic: The collectives of the step.
        flops: Floating-point operations of the forward and of the backward pass of a micro-batch.
        micro_batches: Number of micro-batches per process in the step.
        hardware: The GPUs and what connects them.
        kept: Bytes of activations that are kept for a micro-batch, for networks of convolutions.
        products: Floating-point operations of the update's matrix products, in bf16.
    """

    def seconds(mfu: float, passes: float, exposed_share: float) -> float:
        micro_batch = sum(flops) / (mfu * hardware.peak)
        if hardware.memory_bandwidth is not None:
            micro_batch = max(micro_batch, passes * kept / hardware.memory_bandwidth)
        computing = [micro_batch * each / sum(flops) for each in flops]
        updating = products / (mfu * hardware.bf16_peak)
        return updating + step_seconds(traffic, computing, micro_batches, hardware.fabric, exposed_share)

    return {
        "least": seconds(max(MFU), min(CONVOLUTION_PASSES), min(EXPOSED_SHARE)),
        "most": seconds(min(MFU), max(CONVOLUTION_PASSES), max(EXPOSED_SHARE)),
    }


def step_seconds(
    collectives: Sequence[Collective],
    computing: Sequence[float],
    micro_batches: int,
    fabric: Fabric,
    exposed_share: float,
) -> float:
    """The time of an optimizer step with these collectives; see `overlapped` for the exposed share.

    `computing` is what a micro-batch's forward and backward pass take without communication.
    """
    step = 0.0
    for collective in collectives:
        if collective.phase == "update":
            step += collective.times * collective_seconds(collective, fabric)
    for phase, computed in zip(("forward", "backward"), computing, strict=True):
        # What each micro-batch communicates, and what the last one adds.
        each = 0.0
        last = 0.0
        for collective in collectives:
            if collective.phase == phase:
                seconds = collective_seconds(collective, fabric)
                each += collective.times // micro_batches * seconds
                last += collective.times % micro_batches * seconds
        step += (micro_batches - 1) * overlapped(computed, each, exposed_share)
        step += overlapped(computed, each + last, exposed_share)
    return step


def overlapped(computing: float, communicating: float, exposed_share: float) -> float:
    """The time of computation and communication together, where a share of the shorter is not hidden by the longer.

    A share of 0 gives the longer of the two, and 1 gives their sum. It is positive because collectives take
    multiprocessors and memory bandwidth from the computation, and because the first has nothing to hide behind.
    """
    return max(computing, communicating) + exposed_share * min(computing, communicating)


def collective_seconds(collective: Collective, fabric: Fabric) -> float:
    """The time of all calls of a collective, without its repetitions (`times`)."""
    size = collective.size / collective.calls
    if collective.operation == "exchange":
        return collective.calls * exchange(size, collective.group, fabric)
    seconds = ring(size, collective.group, fabric, collective.passes)
    if collective.operation == "all-reduce":
        # NCCL, too, chooses the faster algorithm.
        seconds = min(seconds, tree(size, collective.group, fabric))
    return collective.calls * seconds


def ring(size: float, group: Group, fabric: Fabric, passes: int) -> float:
    """The time of an all-gather or reduce-scatter (one pass), or of an all-reduce, which is both (two passes).

    A pass takes n - 1 hops of size / n bytes (Thakur et al., sections 4.1 and 4.2). The hops between nodes are
    one fewer than the nodes (NCCL's `nInterSteps`).
    """
    hops = group.size - 1
    net_hops = _nodes(group, fabric) - 1
    latency = (hops - net_hops) * fabric.node_latency + net_hops * fabric.net_latency
    return fabric.call_latency + passes * (latency + hops / group.size * size / _bandwidth(group, fabric))


def tree(size: float, group: Group, fabric: Fabric) -> float:
    """The time of an all-reduce up and down a binary tree of nodes, with a chain in each: fewer hops than a ring.

    All bytes are sent twice. NCCL's formula is the same: its two trees of half the bytes each send as much as its ring.
    """
    hops = group.on_a_node(fabric.gpus_per_node) - 1
    net_hops = math.ceil(math.log2(_nodes(group, fabric)))
    latency = hops * fabric.node_latency + net_hops * fabric.net_latency
    return fabric.call_latency + 2 * (latency + size / _bandwidth(group, fabric))


def exchange(size: float, group: Group, fabric: Fabric) -> float:
    """The time in which each process sends an equal share of its bytes to each of the group, all at once."""
    on_a_node = group.on_a_node(fabric.gpus_per_node)
    near = size * (on_a_node - 1) / group.size / fabric.node_bandwidth
    far = size * (group.size - on_a_node) / group.size / fabric.net_bandwidth
    return fabric.call_latency + (fabric.net_latency if far else fabric.node_latency) + max(near, far)


def _nodes(group: Group, fabric: Fabric) -> int:
    return math.ceil(group.size / group.on_a_node(fabric.gpus_per_node))


def _bandwidth(group: Group, fabric: Fabric) -> float:
    """The bandwidth of a ring's slowest link; what leaves a node uses the network shares of the group's GPUs in it."""
    if _nodes(group, fabric) == 1:
        return fabric.node_bandwidth
    return min(fabric.node_bandwidth, group.on_a_node(fabric.gpus_per_node) * fabric.net_bandwidth)
