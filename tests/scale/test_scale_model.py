"""bench/scale/model.py against values by hand, collectives played through, and limits."""

from dataclasses import replace

import pytest

from model import (
    STRATEGIES,
    Fabric,
    Group,
    Job,
    all_reduce,
    computing_seconds,
    everyone,
    overlapped,
    ring,
    state_bytes,
    step_seconds,
    three_phase_all_reduce,
    tree_all_reduce,
)

FABRIC = Fabric(gpus_per_node=8, call_latency=1, node_latency=2, net_latency=10, node_bandwidth=100, net_bandwidth=5)
# A second is a byte that every GPU sends.
BYTES = Fabric(8, call_latency=0, node_latency=0, net_latency=0, node_bandwidth=1, net_bandwidth=1)
OURS = ("ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3")


def test_ring_by_hand():
    # One node: 7 hops of 2, and 7/8 of 320 bytes at 100.
    assert ring(320, Group(8, 1), FABRIC) == pytest.approx(1 + 14 + 2.8)
    # Two nodes: 14 hops of 2 and one of 10; 15/16 of the bytes at 8 x 5.
    assert ring(320, Group(8, 2), FABRIC) == pytest.approx(1 + 28 + 10 + 7.5)
    assert ring(320, Group(8, 2), FABRIC, passes=2) == pytest.approx(1 + 2 * (28 + 10 + 7.5))
    # One GPU of each of four nodes: 3 hops of 10, 3/4 of the bytes at its own 5.
    assert ring(320, Group(1, 4), FABRIC) == pytest.approx(1 + 30 + 48)
    # A network faster than the node: the node is the narrowest place.
    assert ring(320, Group(8, 2), replace(FABRIC, net_bandwidth=50)) == pytest.approx(1 + 28 + 10 + 3)


def test_tree_by_hand():
    # Four nodes: 7 hops of 2 and 2 of 10, up and down; all bytes twice at 8 x 5.
    assert tree_all_reduce(320, Group(8, 4), FABRIC) == pytest.approx(1 + 2 * (14 + 20 + 8))
    # Six nodes are three levels, as eight are.
    assert tree_all_reduce(0, Group(8, 6), FABRIC) == tree_all_reduce(0, Group(8, 8), FABRIC) == 1 + 2 * (14 + 30)


def test_three_phases_by_hand():
    # 7 hops of 2 and 320 bytes at 100, twice; 2 x 2 hops of 10, and 2 x 3/4 of the bytes at 40.
    assert three_phase_all_reduce(320, Group(8, 4), FABRIC) == pytest.approx(2 * (14 + 3.2) + 40 + 12)
    assert three_phase_all_reduce(320, Group(8, 1), FABRIC) == pytest.approx(2 * (14 + 3.2))


def test_all_reduce_is_the_faster_one():
    many = Group(8, 64)
    assert all_reduce(1, many, FABRIC) == tree_all_reduce(1, many, FABRIC) < ring(1, many, FABRIC, passes=2)
    two = Group(8, 2)
    assert all_reduce(1e6, two, FABRIC) == ring(1e6, two, FABRIC, passes=2) < tree_all_reduce(1e6, two, FABRIC)


@pytest.mark.parametrize("gpus", [2, 5, 8])
def test_ring_sends_what_a_ring_sends(gpus):
    """An all-gather played through: each GPU passes on the piece that it got last, until all have all."""
    have = [{gpu} for gpu in range(gpus)]
    newest, hops = list(range(gpus)), 0
    while any(len(each) < gpus for each in have):
        newest = [newest[gpu - 1] for gpu in range(gpus)]
        for each, piece in zip(have, newest, strict=True):
            each.add(piece)
        hops += 1
    size = 840
    only_hops = replace(BYTES, node_latency=1, node_bandwidth=float("inf"))
    assert ring(size, Group(gpus, 1), only_hops) == hops
    assert ring(size, Group(gpus, 1), BYTES) == pytest.approx(hops * size / gpus)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_halving_and_doubling_sends_what_it_sends(nodes):
    """Played through for one node: it sends half of what it is still to reduce, then the same pieces come back."""
    size, sent, hops, holds = 960.0, 0.0, 0, 960.0
    while holds > size / nodes:
        holds /= 2
        sent, hops = sent + holds, hops + 1
    while holds < size:
        sent, hops = sent + holds, hops + 1
        holds *= 2
    assert three_phase_all_reduce(size, Group(1, nodes), BYTES) == pytest.approx(sent)
    only_hops = replace(BYTES, net_latency=1, net_bandwidth=float("inf"))
    assert three_phase_all_reduce(size, Group(1, nodes), only_hops) == hops


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_communicates_nothing(strategy):
    assert step_seconds(3.0, Job(strategy, 1e6, 5, micro_batches=4), 1, FABRIC, 1.0) == pytest.approx(12)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("gpus", [8, 512])
def test_bytes_of_a_step(gpus, micro_batches):
    """In units of 4 bytes x parameters x (n - 1) / n; what each strategy does is in docs/architecture.md."""
    params, k = 1e6, micro_batches
    expected = {"ddp": 2, "zero1": 3, "zero2": 2 * k + 1, "fsdp2": 2 * k + 1, "zero3": 3 * k}
    for strategy, times in expected.items():
        seconds = step_seconds(0, Job(strategy, params, 13, k), gpus, BYTES, 0.5)
        assert seconds == pytest.approx(times * 4 * params * (gpus - 1) / gpus), strategy


def test_bytes_of_hsdp():
    """Whole weights and gradients within the node, an eighth of the gradients between 64 of them."""
    fabric, params = replace(BYTES, net_bandwidth=0.1), 1e6
    expected = 5 * 4 * params * 7 / 8 + 2 * 4 * params / 8 * 63 / 64 / 0.1
    assert step_seconds(0, Job("hsdp", params, 13, 2), 512, fabric, 0.5) == pytest.approx(expected)


def test_bytes_of_an_element():
    job = Job("fsdp2", 1e6, 13, gather_bytes=2, reduce_bytes=8)
    assert step_seconds(0, job, 8, BYTES, 0.5) == pytest.approx((2 + 2 + 8) * 1e6 * 7 / 8)


def test_latency_of_the_number_of_calls():
    """13 units: 26 gatherings with each of 2 micro-batches, and 13 reductions with the last."""
    only_calls = replace(BYTES, call_latency=1, node_bandwidth=float("inf"))
    assert step_seconds(0, Job("fsdp2", 1e6, 13, 2), 8, only_calls, 0.5) == 2 * 26 + 13
    # 300 MB: buckets of 25 MiB of gradients; of 5e8 elements; prefetches of 5e7.
    assert step_seconds(0, Job("ddp", 75e6, 13), 8, only_calls, 0.5) == 12
    assert step_seconds(0, Job("zero1", 75e6, 13), 8, only_calls, 0.5) == 1 + 2
    assert step_seconds(0, Job("zero3", 75e6, 13), 8, only_calls, 0.5) == 2 + 2 + 1


def test_overlap():
    assert overlapped(5, 3, 0) == overlapped(3, 5, 0) == 5
    assert overlapped(5, 3, 1) == 8
    assert overlapped(5, 3, 0.5) == 6.5
    # 6 s forward and 12 backward against 7 s each of gathering, and 7 more of scattering.
    job = Job("full_shard", 2, 1)
    assert step_seconds(18, job, 8, BYTES, 0) == pytest.approx(7 + 14)
    assert step_seconds(18, job, 8, BYTES, 1) == pytest.approx(18 + 21)
    # Nothing is computed while the updated weights are gathered.
    assert step_seconds(100, Job("zero1", 2, 1), 8, BYTES, 0) == pytest.approx(100 + 7)


@pytest.mark.parametrize("strategy", OURS)
def test_efficiency_falls_with_the_gpus(strategy):
    job = Job(strategy, 1e3, 5)
    times = [step_seconds(100.0, job, gpus, FABRIC, 0.5) for gpus in (1, 8, 16, 64, 512, 4096)]
    assert times == sorted(times)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_computing_from_a_measured_step(strategy):
    job = Job(strategy, 1e3, 5, micro_batches=2)
    step = step_seconds(123.0, job, 64, FABRIC, 0.3)
    assert computing_seconds(step, job, 64, FABRIC, 0.3) == pytest.approx(123.0)


def test_a_step_too_short_for_its_communication():
    with pytest.raises(ValueError, match=r"on 64 GPUs communicates for longer than a step of 0\.1 s"):
        computing_seconds(0.1, Job("ddp", 1e3, 5), 64, FABRIC, 0.3)


def test_gpus_fill_nodes():
    assert everyone(4, FABRIC) == Group(4, 1)
    assert everyone(24, FABRIC) == Group(8, 3)
    with pytest.raises(ValueError, match="12 GPUs do not fill nodes of 8: give a multiple of 8, or fewer than 8"):
        everyone(12, FABRIC)


def test_memory_of_the_state():
    """Bytes for each parameter: 4 of weights, 4 of gradients, 8 of moments, each whole or over 16 GPUs (HSDP: 8)."""
    expected = {
        "ddp": (16, 16),
        "zero1": (8 + 8 / 16, 8 + 8 / 16),
        "zero2": (4 + 12 / 16, 4 + 12 / 16),
        "fsdp2": (16 / 16, 4 + 12 / 16),
        "hsdp": (16 / 8, 4 + 12 / 8),
        "zero3": (16 / 16, 16 / 16),
    }
    for strategy, each in expected.items():
        found = tuple(state_bytes(Job(strategy, 10, 5, k), 16, FABRIC) / 10 for k in (1, 2))
        assert found == pytest.approx(each), strategy
