"""The pre-flight of a node from beginning to end, in phases that all nodes enter together."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from largebatch.tools.local_jobs.jobs import JobFailed
from largebatch.tools.preflight import all_reduce
from largebatch.tools.preflight.all_reduce import NUM_MEASUREMENTS, in_words, measure
from largebatch.tools.preflight.meeting import Ended, Meeting, Node
from largebatch.tools.preflight.node import check_node
from largebatch.tools.preflight.verdict import GOOD, Findings

SECONDS_TO_CHECK = 420.0  # how long a node's own checks may take: GPUs start slowly on a cold node, and then measure
SECONDS_TO_TELL = 30.0
MAX_FAILURES = 3


def preflight(
    node: Node, recipe: Path, accelerate_config: Path, overrides: Sequence[str], minimum_bandwidth: float
) -> int:
    """Check this node together with the others, and return the exit code, which is the same on all of them.

    `minimum_bandwidth` is the bus bandwidth of the all-reduce, in GB/s, that the job needs; 0 if it is only printed.
    """
    # The processes of the all-reduce are forked from one that has imported torch.
    multiprocessing.get_context("forkserver").set_forkserver_preload([all_reduce.__name__])
    meeting = None
    try:
        meeting = Meeting(node)
        meeting.report("presence", Findings(node.name), node.seconds, meeting.judge_presence)
        meeting.report("its own checks", check_node(node, recipe, accelerate_config, overrides), SECONDS_TO_CHECK)
        if node.num_nodes * node.processes > 1:
            findings = _all_reduce(meeting, minimum_bandwidth)
            meeting.report("the all-reduce", findings, all_reduce.SECONDS + SECONDS_TO_TELL)
    except Ended as ended:
        return ended.exit_code
    finally:
        if meeting:
            meeting.close()
    return GOOD


def _all_reduce(meeting: Meeting, minimum_bandwidth: float) -> Findings:
    """Measure the all-reduce over all nodes. If it fails, the first nodes to notice say why."""
    node, store = meeting.node, meeting.store
    findings, what = Findings(node.name), in_words(node)
    try:
        bandwidth = measure(node, store, node.folder / f"all_reduce_{node.name}")
    except JobFailed as failure:
        number = store.add("failures", 1)
        if number <= MAX_FAILURES:
            findings.refusals.append(f"{what}: failure {number}, on {node.name}: {failure.in_one_line()}")
        return findings
    if node.rank == 0:
        result = f"{what}: {bandwidth:.2f} GB/s (bus bandwidth, median of {NUM_MEASUREMENTS})"
        if bandwidth < minimum_bandwidth:
            findings.refusals.append(
                f"{result}, less than LARGEBATCH_MIN_BUSBW={minimum_bandwidth:g}; see docs/preflight.md"
            )
        else:
            findings.notes.append(result)
    return findings
