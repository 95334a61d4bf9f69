"""The pre-flight of a node from beginning to end, in phases that all nodes enter together."""

import time
from collections.abc import Sequence
from pathlib import Path

from largebatch.tools.local_jobs.jobs import JobFailed, preload_only, run_job
from largebatch.tools.preflight import all_reduce, node_checks
from largebatch.tools.preflight.all_reduce import NUM_MEASUREMENTS, describe_all_reduce, measure
from largebatch.tools.preflight.connection import listen
from largebatch.tools.preflight.node_checks import check_node
from largebatch.tools.preflight.reports import PRESENCE, Node, report
from largebatch.tools.preflight.verdict import GOOD, Findings
from largebatch.words import counted

SECONDS_TO_CHECK = 390.0  # how long a node's own checks may take: GPUs start slowly on a cold node, and then measure
SECONDS_TO_TELL = 30.0  # how long a report may take to be seen on all nodes


def preflight(
    node: Node, recipe: Path, accelerate_config: Path, overrides: Sequence[str], minimum_bandwidth: float
) -> int:
    """Check this node together with the others, and return the exit code, which is the same on all of them.

    `minimum_bandwidth` is the bus bandwidth of the all-reduce, in GB/s, that the job needs; 0 if it is only printed.
    """
    preload_only(all_reduce.__name__, node_checks.__name__)
    if node.rank == 0:
        print(f"Pre-flight on {counted(node.num_nodes, 'node')}:", flush=True)
    presence = Findings(node.name)
    with listen(node, presence):
        code = report(node, PRESENCE, presence, node.began + node.seconds)
        if code == GOOD:
            deadline = time.monotonic() + SECONDS_TO_CHECK + SECONDS_TO_TELL
            code = report(node, "checks", _check(node, recipe, accelerate_config, overrides), deadline)
    if code == GOOD and node.num_nodes * node.processes > 1:
        deadline = time.monotonic() + all_reduce.SECONDS + SECONDS_TO_TELL
        code = report(node, "all_reduce", _all_reduce(node, minimum_bandwidth), deadline)
    return code


def _check(node: Node, recipe: Path, accelerate_config: Path, overrides: Sequence[str]) -> Findings:
    """Check this node in a process of its own, which a driver may crash, or cause to hang."""
    seconds = SECONDS_TO_CHECK
    if node.rank == 0:
        # It also builds the recipe's model, which may use what is left of the time for presence.
        seconds += node.seconds - (time.monotonic() - node.began)
    try:
        found: list[Findings] = run_job(
            check_node,
            node,
            recipe,
            accelerate_config,
            overrides,
            world_size=1,
            environment={},
            folder=Path.cwd(),
            timeout=seconds,
        )
    except JobFailed as failure:
        return Findings(node.name, problems=[f"its own checks failed: {failure.in_one_line()}"])
    return found[0]


def _all_reduce(node: Node, minimum_bandwidth: float) -> Findings:
    """Measure the all-reduce over all nodes."""
    findings = Findings(node.name)
    what = describe_all_reduce(node)
    try:
        bandwidth = measure(node, node.folder / f"all_reduce_{node.name}")
    except JobFailed as failure:
        findings.failure = f"{what}: {failure.in_one_line()}"
        findings.failed_at = time.time()
        return findings
    if node.rank == 0:
        result = f"{what}: {bandwidth:.2f} GB/s (bus bandwidth, median of {NUM_MEASUREMENTS})"
        if bandwidth < minimum_bandwidth:
            findings.refusals.append(
                f"{result}, less than LARGEBATCH_MIN_BUSBW={minimum_bandwidth:g}; see docs/slurm.md"
            )
        else:
            findings.notes.append(result)
    return findings
