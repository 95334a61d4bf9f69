"""The pre-flight of a node from beginning to end, in phases that all nodes enter together."""

import socket
import time
from contextlib import AbstractContextManager, nullcontext

from largebatch.errors import reason_of
from largebatch.tools.local_jobs.jobs import JobFailed, preload_only, run_job
from largebatch.tools.preflight import all_reduce, node_checks
from largebatch.tools.preflight.all_reduce import measure
from largebatch.tools.preflight.node_checks import check_node
from largebatch.tools.preflight.reports import PRESENCE, Node, Report, Severity, agree
from largebatch.words import counted

SECONDS_TO_CHECK = 390.0  # how long a node's own checks may take: GPUs start slowly on a cold node
SECONDS_TO_TELL = 30.0  # how long a report may take to be seen on all nodes


def preflight(node: Node) -> int:
    """Check this node together with the others, and return the exit code, which is the same on all of them."""
    preload_only(all_reduce.__name__, node_checks.__name__)
    if node.rank == 0:
        print(f"Pre-flight on {counted(node.num_nodes, 'node')}:", flush=True)
    presence = Report(node.name)
    with _listen(node, presence):
        code = agree(node, PRESENCE, presence, node.began + node.seconds)
        if code == 0:
            deadline = time.monotonic() + SECONDS_TO_CHECK + SECONDS_TO_TELL
            code = agree(node, "checks", _check(node), deadline)
    if code == 0 and node.num_nodes * node.processes > 1:
        deadline = time.monotonic() + all_reduce.SECONDS + SECONDS_TO_TELL
        code = agree(node, "all_reduce", measure(node), deadline)
    return code


def _listen(node: Node, presence: Report) -> AbstractContextManager[object]:
    """Listen on the first node while the others check that they can connect."""
    if node.rank > 0 or node.num_nodes == 1:
        return nullcontext()
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", node.port), family=family, backlog=node.num_nodes, dualstack_ipv6=dual)
    except OSError as error:
        text = f"cannot listen at {node.host}:{node.port} ({reason_of(error)}): start the job again"
        presence.findings[text] = Severity.REFUSED
        return nullcontext()


def _check(node: Node) -> Report:
    """Check this node in a process of its own, which a driver may crash, or cause to hang."""
    try:
        reports: list[Report] = run_job(check_node, node, timeout=SECONDS_TO_CHECK)
    except JobFailed as failure:
        return Report(node.name, {f"its own checks failed: {failure.in_one_line()}": Severity.BAD_NODE})
    return reports[0]
