"""The all-reduce over the processes of one node."""

import pytest

from largebatch.tools.preflight.all_reduce import measure
from preflight_nodes import a_node


@pytest.mark.slow
def test_processes_of_a_node_measure_and_leave_their_output(tmp_path, monkeypatch):
    """As many as a node with two GPUs has, but on CPUs."""
    node = a_node(tmp_path)
    monkeypatch.setattr(type(node), "processes", 2)
    [said] = measure(node).findings
    assert said.startswith("all-reduce of 64 MiB over 1 node by gloo, 2 processes per node: ")
    assert sorted(path.name for path in (tmp_path / "all_reduce_n1").iterdir()) == ["rank0.log", "rank1.log"]
