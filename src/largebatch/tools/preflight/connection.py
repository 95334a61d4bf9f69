"""Whether nodes can connect to the first one, where the processes of the training will meet."""

import socket
from contextlib import AbstractContextManager, nullcontext

from largebatch.errors import reason_of
from largebatch.tools.preflight.reports import Node
from largebatch.tools.preflight.verdict import Findings

SECONDS_TO_CONNECT = 30.0


def listen(node: Node, findings: Findings) -> AbstractContextManager[object]:
    """Listen on the first node while the others check that they can connect; a failure is among the findings."""
    if node.rank > 0 or node.num_nodes == 1:
        return nullcontext()
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", node.port), family=family, backlog=node.num_nodes, dualstack_ipv6=dual)
    except OSError as error:
        findings.refusals.append(
            f"{node.name} cannot listen at {node.host}:{node.port} ({reason_of(error)}): start the job again"
        )
        return nullcontext()


def connection_problem(node: Node) -> str:
    """Why this node cannot connect to the first one; empty if it can."""
    try:
        socket.create_connection((node.host, node.port), SECONDS_TO_CONNECT).close()
    except OSError as error:
        return f"cannot connect to the first node at {node.host}:{node.port} ({_addresses(node)}): {reason_of(error)}"
    return ""


def _addresses(node: Node) -> str:
    """What the name of the first node stands for here."""
    try:
        found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
    except OSError:
        return "the name is unknown"
    return ", ".join(sorted({str(address[0]) for *_, address in found}))
