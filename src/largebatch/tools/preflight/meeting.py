"""How the nodes of a job meet and agree: at a store on the first node, in phases that each have a deadline.

In a phase every node reports to the first node, which waits for all of them, decides, and tells everybody. A node that
misses the deadline of the first phase, presence, is late, but not bad. A node that was present and misses a later
deadline has stopped answering.
"""

import hashlib
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import NoReturn

# torch.distributed has it, too, but not for type checkers.
from torch._C._distributed_c10d import TCPStore

from largebatch.errors import reason_of
from largebatch.storage.files import replace_file
from largebatch.tools.local_jobs.jobs import local_store
from largebatch.tools.preflight.verdict import BAD_NODES, GOOD, REFUSED, Findings, Verdict, judge
from largebatch.words import counted

EXIT_CODES = {b"0": GOOD, b"2": REFUSED, b"3": BAD_NODES}  # of a decision, as it is in the store
UNREACHABLE = "cannot connect to the first node"
SECONDS_TO_CONNECT = 5.0
SECONDS_UNREACHABLE = 30.0  # how long to try to connect to a first node that is known to be listening
SECONDS_TO_ANSWER = 60.0  # how long a store that accepts connections may take to answer
SECONDS_FOR_FIRST_NODE = 1800.0  # how long others wait for it in a phase; a lost connection is noticed at once
SECONDS_TO_LEAVE = 10.0


@dataclass(frozen=True)
class Node:
    """This node, and the facts about the job that it must know."""

    name: str
    rank: int  # from 0
    num_nodes: int
    folder: Path  # a folder that all nodes share, with the file `token` in it
    token: str  # what that file must say; different for each start
    host: str  # the first node, where the processes of the job will meet, too
    port: int
    gpus: int  # GPUs that the job was given on each node; 0 for a job on CPUs
    seconds: float  # how long to wait until all nodes are present
    names: tuple[str, ...] = ()  # all nodes in order, if known

    @property
    def processes(self) -> int:
        """The processes that take part in the all-reduce on each node."""
        return self.gpus or 1

    def file(self, name: str) -> Path:
        """A file with which nodes tell each other what they cannot tell through the store.

        Its name depends on the token, but does not disclose it.
        """
        return self.folder / f"{name}.{hashlib.sha256(self.token.encode()).hexdigest()[:16]}"


class Ended(Exception):
    """The pre-flight is over for this node, with an exit code."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


def conclude(node: Node, verdict: Verdict) -> int:
    """Print the verdict, on the first node, and return its exit code.

    Files tell the exit code to late nodes, and the bad nodes to the batch script.
    """
    for line in verdict.lines():
        print(line, flush=True)
    if verdict.bad_nodes:
        _write(node.folder / "bad_nodes", ",".join(verdict.bad_nodes) + "\n")
    if verdict.exit_code != GOOD:
        _write(node.file("ended"), str(verdict.exit_code))
    return verdict.exit_code


def _give_up(node: Node, message: str, exit_code: int) -> NoReturn:
    """End the pre-flight on a node that cannot hear from the first node."""
    print(f"error: {node.name}: {message}", file=sys.stderr, flush=True)
    raise Ended(exit_code)


class Meeting:
    """The store at which the nodes meet: open on the first node, until `close`."""

    def __init__(self, node: Node):
        self.node = node
        if node.rank == 0:
            print(f"Pre-flight on {counted(node.num_nodes, 'node')}:", flush=True)
        self.store = _listen(node) if node.rank == 0 else _connect(node)
        self._names = dict(enumerate(node.names))
        self._listeners = 0

    def report(
        self,
        phase: str,
        findings: Findings,
        seconds: float,
        judge: Callable[[Sequence[Findings], Mapping[str, str]], Verdict] = judge,
    ) -> None:
        """Report this node's findings to the first node, and wait for its decision.

        Args:
            phase: Different each time; named in messages.
            findings: What this node found.
            seconds: How long the first node waits for all nodes.
            judge: Called on the first node only, with the findings in the order of the nodes, and the nodes that did
                not report, with the reason.

        Raises:
            Ended: The pre-flight is over, with the same exit code on all nodes.
        """
        decision = f"{phase}: decision"
        try:
            self.store.set(f"{phase}: {self.node.rank}", json.dumps(asdict(findings)))
            if self.node.rank == 0:
                self.store.set(decision, str(conclude(self.node, judge(*self._collect(phase, seconds)))))
            else:
                self.store.wait([decision], timedelta(seconds=self.node.seconds + SECONDS_FOR_FIRST_NODE))
            code = EXIT_CODES.get(self.store.get(decision), BAD_NODES)
        # torch's errors about connections and timeouts.
        except RuntimeError as error:
            message = f"the first node, {self.node.host}, stopped answering in {phase}: {reason_of(error)}"
            _give_up(self.node, message, BAD_NODES)
        if code != GOOD:
            raise Ended(code)

    def _collect(self, phase: str, seconds: float) -> tuple[list[Findings], dict[str, str]]:
        deadline = time.monotonic() + seconds
        found, silent = [], {}
        for rank in range(self.node.num_nodes):
            key = f"{phase}: {rank}"
            unreachable = self.node.file(f"unreachable_{rank}")
            while not self.store.check([key]) and not unreachable.exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            name = self._names.get(rank, f"node {rank}")
            if not self.store.check([key]):
                silence = f"it stopped answering in {phase}: no answer within {seconds:.0f} seconds"
                silent[name] = _read(unreachable) or silence
            elif findings := Findings.read(self.store.get(key)):
                found.append(findings)
                self._names[rank] = findings.node
            else:
                silent[name] = f"it sent something that is not a report in {phase}"
        self._listeners = len(found) - 1
        return found, silent

    def judge_presence(self, present: Sequence[Findings], missing: Mapping[str, str]) -> Verdict:
        """Which nodes are late, and which cannot reach the first one."""
        bad = {name: [f"{name} {reason}"] for name, reason in missing.items() if UNREACHABLE in reason}
        late = ", ".join(name for name in missing if name not in bad)
        if bad and len(present) == 1:
            # Nobody has reached the first node.
            bad = {self.node.name: list(chain.from_iterable(bad.values()))}
        problem = (
            f"late: {late}: not present after {self.node.seconds:.0f} seconds; if nodes need longer to start, raise "
            "LARGEBATCH_PREFLIGHT_SECONDS"
        )
        return Verdict(bad, [problem] if late else [])

    def close(self) -> None:
        """Wait until the other nodes have heard the last decision, and close the store, whose port training uses."""
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        if self.node.rank == 0:
            while self.store.add("left", 0) < self._listeners and time.monotonic() < deadline:
                time.sleep(0.1)
        else:
            with suppress(RuntimeError):
                self.store.add("left", 1)
        del self.store


def _store(host: str, port: int, *, is_master: bool) -> TCPStore:
    timeout = timedelta(seconds=SECONDS_TO_ANSWER)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _listen(node: Node) -> TCPStore:
    if node.num_nodes == 1:
        # Its processes meet elsewhere.
        return local_store()
    try:
        store = _store(node.host, node.port, is_master=True)
    except RuntimeError as error:
        remedy = f"start the job again; if {node.host} is not the address of {node.name}, correct it"
        problem = f"{node.name} cannot open a store at {node.host}:{node.port} ({reason_of(error)}): {remedy}"
        raise Ended(conclude(node, Verdict(problems=[problem]))) from error
    _write(node.file("listening"), "")
    return store


def _connect(node: Node) -> TCPStore:
    deadline = time.monotonic() + node.seconds
    # First of all, because afterward another program may use the port.
    while not (code := _read(node.file("ended"))):
        try:
            socket.create_connection((node.host, node.port), SECONDS_TO_CONNECT).close()
            return _store(node.host, node.port, is_master=False)
        except RuntimeError as error:
            problem = (
                f"{node.host}:{node.port} accepts connections but does not answer ({reason_of(error)}): another "
                "program uses the port, or there are too many connections; start the job again, and close its ports "
                "to others (SECURITY.md)"
            )
            _say_unreachable(node, problem, REFUSED)
        except OSError as error:
            reason = reason_of(error)
        if node.file("listening").exists():
            deadline = min(deadline, time.monotonic() + SECONDS_UNREACHABLE)
        if time.monotonic() > deadline:
            _say_unreachable(node, f"{UNREACHABLE} at {_place(node)}: {reason}", BAD_NODES)
        time.sleep(0.5)
    print(f"{node.name}: the pre-flight ended before this node was present; see above", file=sys.stderr, flush=True)
    raise Ended(int(code))


def _place(node: Node) -> str:
    """The first node's address and port, and what the name of the address stands for here."""
    try:
        found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
        addresses = ", ".join(sorted({str(each[4][0]) for each in found}))
    except OSError:
        addresses = "the name is unknown"
    return f"{node.host}:{node.port} ({addresses})"


def _say_unreachable(node: Node, problem: str, exit_code: int) -> NoReturn:
    _write(node.file(f"unreachable_{node.rank}"), problem)
    _give_up(node, problem, exit_code)


def _write(path: Path, text: str) -> None:
    # The checks report a folder that cannot be written.
    with suppress(OSError):
        replace_file(path, [memoryview(text.encode())])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
