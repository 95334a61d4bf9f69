"""The all-reduce within a node, of which the other nodes' is the measure."""

import pytest

from largebatch.tools.preflight.all_reduce import measure
from largebatch.tools.preflight.reports import Node


class TwoProcesses(Node):
    """A node with as many processes as one with two GPUs, but on CPUs."""

    processes = 2


@pytest.mark.slow
def test_processes_of_a_node_measure_and_leave_their_output(tmp_path):
    node = TwoProcesses("n1", 0, num_nodes=1, folder=tmp_path, token="", host="", port=0, gpus=0, seconds=1.0)
    assert measure(node, tmp_path / "logs") > 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log"]
