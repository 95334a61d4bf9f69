"""The processes of the all-reduce, and which nodes are found to be slow, on nodes whose speeds are known."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from largebatch.tools.preflight import bandwidth
from largebatch.tools.preflight.all_reduce import AllReduce, why
from largebatch.tools.preflight.bandwidth import measure, search, start
from largebatch.tools.preflight.meeting import Job

FAST, SLOW = 100.0, 3.0


def found(nodes, slow, minimum=50.0, several=False, slow_alone=()):
    """The nodes that are named, and how many rounds it took; an all-reduce is as slow as its slowest node."""
    rounds = search(nodes, several, minimum)
    groups, count = next(rounds), 0
    try:
        while True:
            count += 1
            members = list(itertools.chain(*groups))
            assert len(members) == len(set(members)), "a node cannot take part in two groups at once"
            speeds = []
            for group in groups:
                limits = slow if len(group) > 1 else slow_alone
                speeds.append(min([limits.get(node, FAST) for node in group]))
            groups = rounds.send(speeds)
    except StopIteration as end:
        return end.value, count


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 17])
def test_every_slow_node_is_named_and_no_other(nodes):
    for number in range(1, (nodes + 1) // 2):
        for slow in itertools.islice(itertools.combinations(range(nodes), number), 200):
            assert found(nodes, dict.fromkeys(slow, SLOW))[0] == list(slow)


def test_the_number_of_rounds_does_not_grow_with_the_number_of_nodes():
    assert found(512, {77: SLOW, 300: SLOW}) == ([77, 300], 3)


def test_a_node_that_fails_is_named_without_a_minimum():
    assert found(4, {2: 0.0}, minimum=0.0)[0] == [2]


def test_a_node_that_is_slow_by_itself():
    assert found(2, {1: SLOW}, several=True, slow_alone={1: SLOW}) == ([1], 1)


@pytest.mark.parametrize(("nodes", "several"), [(1, True), (2, False), (5, False), (3, True)])
def test_a_network_that_is_slow_everywhere_is_no_nodes_fault(nodes, several):
    slow = dict.fromkeys(range(nodes), SLOW)
    rounds = search(nodes, several, 50.0)
    if nodes == 1 or not (several or nodes > 2):
        with pytest.raises(StopIteration) as end:
            next(rounds)
        assert end.value.value == []
    else:
        assert found(nodes, slow, several=several, slow_alone=slow)[0] == []


def test_fast_pairs_blame_nobody():
    assert found(6, {})[0] == []


def job(folder, rank):
    return Job(f"n{rank}", rank, 2, folder, "42", "localhost", 1, gpus=0, processes_per_node=1, seconds=1.0)


@pytest.mark.slow
def test_the_processes_measure_and_end_with_their_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "MEBIBYTES_ON_CPUS", 1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    alone = AllReduce("localhost", store.port, "alone", "n3", 0, 2, gpu=-1, mebibytes=1, seconds=600.0)
    waiting = start(job(tmp_path, 0), alone)
    with ThreadPoolExecutor(2) as nodes:
        for done in [nodes.submit(measure, job(tmp_path, rank), store, "both", [0, 1]) for rank in (0, 1)]:
            done.result()
    assert float(store.get("both/speed")) > 0
    assert why(store, "both") == ""
    # It waits for a rank that does not come.
    assert waiting.poll() is None
    waiting.stdin.close()
    assert waiting.wait(timeout=60) == 1
