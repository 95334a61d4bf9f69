"""The all-reduce within a node, of which the other nodes' is the measure."""

import pytest

from largebatch.tools.preflight.all_reduce import AllReduce, measure
from largebatch.tools.verify.jobs import meeting_place


@pytest.mark.slow
def test_processes_of_a_node_measure_and_leave_their_output(tmp_path):
    with meeting_place() as place:
        it = AllReduce(place["MASTER_ADDR"], int(place["MASTER_PORT"]), 1, 0, processes_per_node=2, on_gpus=False)
        assert measure(it, tmp_path / "logs") > 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log"]
