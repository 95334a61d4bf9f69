"""The time of a step against values by hand, collectives played through, and limits."""

from dataclasses import replace

import pytest

from largebatch.estimate.step_time import (
    CONVOLUTION_PASSES,
    EXPOSED_SHARE,
    MFU,
    Fabric,
    Hardware,
    collective_seconds,
    overlapped,
    ring,
    step_seconds,
    step_time,
    tree,
)
from largebatch.estimate.traffic import Collective, Group

FABRIC = Fabric(8, node_bandwidth=100, net_bandwidth=5, call_latency=1, node_latency=2, net_latency=10)
# A second is a byte that every GPU sends.
BYTES = Fabric(8, node_bandwidth=1, net_bandwidth=1, call_latency=0, node_latency=0, net_latency=0)


def test_ring_by_hand():
    # One node: 7 hops of 2, and 7/8 of 320 bytes at 100.
    assert ring(320, Group(8), FABRIC, 1) == pytest.approx(1 + 14 + 2.8)
    # Two nodes: 14 hops of 2 and one of 10; 15/16 of the bytes at 8 x 5.
    assert ring(320, Group(16), FABRIC, 1) == pytest.approx(1 + 28 + 10 + 7.5)
    assert ring(320, Group(16), FABRIC, 2) == pytest.approx(1 + 2 * (28 + 10 + 7.5))
    # One GPU of each of four nodes: 3 hops of 10, 3/4 of the bytes at its own 5.
    assert ring(320, Group(4, stride=8), FABRIC, 1) == pytest.approx(1 + 30 + 48)
    # Every 4th GPU, two of each of two nodes: 2 hops of 2 and one of 10; 3/4 of the bytes at 2 x 5.
    assert ring(320, Group(4, stride=4), FABRIC, 1) == pytest.approx(1 + 4 + 10 + 24)
    # A network faster than the node: the node is the narrowest place.
    assert ring(320, Group(16), replace(FABRIC, net_bandwidth=50), 1) == pytest.approx(1 + 28 + 10 + 3)


def test_tree_by_hand():
    # Four nodes: 7 hops of 2 and 2 of 10, up and down; all bytes twice at 8 x 5.
    assert tree(320, Group(32), FABRIC) == pytest.approx(1 + 2 * (14 + 20 + 8))
    # Six nodes are three levels, as eight are.
    assert tree(0, Group(48), FABRIC) == tree(0, Group(64), FABRIC) == 1 + 2 * (14 + 30)


def test_an_all_reduce_is_the_faster_one():
    def all_reduce(size, gpus):
        return collective_seconds(Collective("all-reduce", size, 1, "backward", Group(gpus)), FABRIC)

    assert all_reduce(1, 512) == tree(1, Group(512), FABRIC) < ring(1, Group(512), FABRIC, 2)
    # Two calls of half of the bytes.
    gather = Collective("gather", 640, 2, "forward", Group(8))
    assert collective_seconds(gather, FABRIC) == 2 * ring(320, Group(8), FABRIC, 1)
    assert all_reduce(10**6, 16) == ring(1e6, Group(16), FABRIC, 2) < tree(1e6, Group(16), FABRIC)


def test_what_is_computed_meanwhile():
    assert overlapped(5, 3, 0) == overlapped(3, 5, 0) == 5
    assert overlapped(5, 3, 1) == 8
    assert overlapped(5, 3, 0.5) == 6.5
    gather = Collective("gather", 8, 1, "forward", Group(8), times=2)
    reduce = Collective("reduce-scatter", 8, 1, "backward", Group(8))
    update = Collective("gather", 16, 1, "update", Group(8))
    # Two micro-batches of 6 s forward and 12 backward; 7 s of gathering with each, of reducing with the last.
    computing = (6, 12)
    assert step_seconds([gather, reduce], computing, 2, BYTES, 0) == 7 + 12 + 7 + 12
    assert step_seconds([gather, reduce], computing, 2, BYTES, 1) == 2 * 18 + 2 * 7 + 7
    # Nothing is computed while the updated weights are gathered.
    assert step_seconds([gather, reduce, update], computing, 2, BYTES, 0) == 38 + 14


def test_the_last_micro_batch_reduces_behind_its_own_backward_pass_only():
    reduce = Collective("reduce-scatter", 8 * 100, 1, "backward", Group(8))
    # 700 s of reducing: 3 backward passes of 10 s, and one hidden behind it.
    assert step_seconds([reduce], (0, 10), 4, BYTES, 0) == 30 + 700


def test_low_and_high_by_hand():
    """300 operations at 0.5 and 0.3 of 10 per second are 60 and 100 s; 7 s of gathering."""
    gather = Collective("gather", 8, 1, "forward", Group(8))
    found = step_time([gather], (100, 200), 1, Hardware(10, 10, BYTES))
    low, high = EXPOSED_SHARE
    assert MFU == (0.3, 0.5)
    assert found == pytest.approx({"least": 60 + 7 * low, "most": 100 + 7 * high})
    # 60 operations of the update at 0.5 and 0.3 of 40 per second; the exchange and the passes do not hide them.
    updated = step_time([gather], (100, 200), 1, Hardware(10, 40, BYTES), products=60)
    assert updated == pytest.approx({"least": found["least"] + 3, "most": found["most"] + 5})


@pytest.mark.parametrize(("kept", "least", "most"), [(0, 60, 100), (5, 85, 100), (6, 102, 114)])
def test_convolutions_wait_for_memory(kept, least, most):
    """60 and 100 s of operations; 17 and 19 passes over what is kept, at a byte per second."""
    assert CONVOLUTION_PASSES == (19, 17)
    hardware = Hardware(10, 10, BYTES, memory_bandwidth=1)
    found = step_time([], (100, 200), 2, hardware, kept)
    assert found == pytest.approx({"least": 2 * least, "most": 2 * most})
    # The forward pass takes a third of it, and 70 s of gathering.
    found = step_time([Collective("gather", 80, 1, "forward", Group(8))], (100, 200), 1, hardware, kept)
    hidden = (1 - EXPOSED_SHARE[0]) * min(least / 3, 70)
    assert found == pytest.approx({"least": least + 70 - hidden, "most": most + 70})
    # Of other models, nothing is known.
    assert step_time([], (100, 200), 1, Hardware(10, 10, BYTES), kept)["least"] == pytest.approx(60)
