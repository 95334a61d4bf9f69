"""How the nodes of a job meet and agree: at a store on the first node, in phases that each have a deadline.

In a phase every node says something; the first node waits for all of them, decides, and tells everybody. A node that
misses the deadline of the first phase, presence, is late, but not bad. A node that was present and misses a later
deadline has stopped answering.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, NoReturn

# torch.distributed has it, too, but not for type checkers.
from torch._C._distributed_c10d import TCPStore

from largebatch.errors import counted, reason_of
from largebatch.storage.files import replace_file
from largebatch.tools.preflight.report import Report
from largebatch.tools.preflight.verdict import BAD_NODES, GOOD, Verdict, judge

SECONDS_TO_CONNECT = 5.0
SECONDS_UNREACHABLE = 30.0  # how long to try to connect to a first node that is known to be listening
SECONDS_TO_ANSWER = 60.0  # how long a store that accepts connections may take to answer
SECONDS_FOR_FIRST_NODE = 1800.0  # how long others wait for it in a phase; a lost connection is noticed at once
SECONDS_TO_LEAVE = 10.0

Message = dict[str, Any]
Decide = Callable[[Mapping[int, Message], Mapping[str, str]], Message]


@dataclass(frozen=True)
class Job:
    """The facts about the job that a node must know."""

    node: str  # this node's name
    rank: int  # from 0
    num_nodes: int
    folder: Path  # a folder that all nodes share, with the file `token` in it
    token: str  # what that file must say; different for each start
    host: str  # the first node, where the processes of the job will meet, too
    port: int
    gpus: int  # GPUs that the job was given on each node; 0 for a job on CPUs
    processes_per_node: int
    seconds: float  # how long to wait until all nodes are present
    names: tuple[str, ...] = ()  # all nodes in order, if known
    only_warns: bool = False  # a job that is refused starts anyway

    def name(self, rank: int) -> str:
        """A node's name, even before it has said it."""
        return self.names[rank] if rank < len(self.names) else f"node {rank}"

    def file(self, name: str) -> Path:
        """A file with which nodes tell each other what they cannot tell through the store."""
        return self.folder / f"{name}.{self.token}"


class Ended(Exception):
    """The pre-flight is over for this node, with an exit code."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


def conclude(job: Job, verdict: Verdict) -> NoReturn:
    """Print the verdict, on the first node, and end the pre-flight; files tell the batch script and late nodes."""
    print(f"Pre-flight on {counted(job.num_nodes, 'node')}:", *verdict.lines(), sep="\n", flush=True)
    code = GOOD if job.only_warns else verdict.exit_code
    if job.only_warns and verdict.exit_code:
        print("  the job starts anyway (LARGEBATCH_PREFLIGHT=warn)", flush=True)
    if code == BAD_NODES:
        _write(job.folder / "bad_nodes", ",".join(verdict.bad_nodes) + "\n")
    _write(job.file("ended"), str(code))
    raise Ended(code)


def _give_up(job: Job, message: str) -> NoReturn:
    """End the pre-flight on a node that cannot hear from the first node."""
    print(f"error: {job.node}: {message}", file=sys.stderr, flush=True)
    raise Ended(GOOD if job.only_warns else BAD_NODES)


class Meeting:
    """The store at which the nodes meet: open on the first node, until `close`."""

    def __init__(self, job: Job):
        self.job = job
        self.nodes: list[str] = []
        self.places: list[tuple[str, int]] = []  # where the nodes, in the same order, accept connections until `close`
        self.store, self._address = _listen(job) if job.rank == 0 else _connect(job)
        self._listeners = 0
        # The kernel accepts connections by itself.
        self._server = listen_at(0)

    def gather(self) -> None:
        """Wait until all nodes are present.

        Raises:
            Ended: They are not.
        """
        job = self.job

        def decide(said: Mapping[int, Message], missing: Mapping[str, str]) -> Message:
            if reports := self._unreachable_nodes():
                if len(said) > len(reports):
                    # Not the fault of the first node, which more nodes have reached.
                    for report in reports:
                        for node, place, reason in report.unreachable:
                            report.problems.append(f"it cannot connect to {node} at {place} ({reason})")
                conclude(job, judge(reports))
            if missing:
                late = f"late: {', '.join(missing)}: not present after {job.seconds:.0f} seconds"
                remedy = "If nodes need longer to start, raise LARGEBATCH_PREFLIGHT_SECONDS"
                others = f"a node that runs but cannot connect to {job.host}:{job.port} says so itself"
                conclude(job, Verdict({}, [f"{late}. {remedy}; {others}"], []))
            everyone = [said[rank] for rank in range(job.num_nodes)]
            return {"nodes": [each["node"] for each in everyone], "places": [each["place"] for each in everyone]}

        me = {"node": job.node, "place": (self._address, self._server.getsockname()[1])}
        told = self.agree("presence", me, job.seconds, decide)
        self.nodes, self.places = told["nodes"], told["places"]

    def agree(self, phase: str, said: Message, seconds: float, decide: Decide) -> Message:
        """Tell the first node something, and return what it decides.

        Args:
            phase: Different each time; named in messages.
            said: What this node says.
            seconds: How long the first node waits for all nodes.
            decide: Called on the first node only, with what the nodes said, by rank, and the nodes that said nothing,
                with the reason. If it ends the pre-flight, that ends on all nodes with the same exit code.

        Raises:
            Ended: The pre-flight is over.
        """
        decision = f"{phase}: decision"
        try:
            self.store.set(f"{phase}: {self.job.rank}", json.dumps(said))
            if self.job.rank == 0:
                try:
                    decided = decide(*self._all_said(phase, seconds))
                except Ended as ended:
                    self.store.set(decision, json.dumps({"exit code": ended.exit_code}))
                    raise
                self.store.set(decision, json.dumps(decided))
                return decided
            self.store.wait([decision], timedelta(seconds=self.job.seconds + SECONDS_FOR_FIRST_NODE))
            told: Message = json.loads(self.store.get(decision))
            if "exit code" in told:
                self.store.add("left", 1)
                raise Ended(told["exit code"])
            return told
        # torch's errors about connections and timeouts.
        except RuntimeError as error:
            _give_up(self.job, f"the first node, {self.job.host}, stopped answering in {phase}: {reason_of(error)}")

    def _all_said(self, phase: str, seconds: float) -> tuple[dict[int, Message], dict[str, str]]:
        deadline = time.monotonic() + seconds
        said, silent = {}, {}
        for rank in range(self.job.num_nodes):
            key = f"{phase}: {rank}"
            while not (there := self.store.check([key])) and time.monotonic() < deadline:
                if not self.nodes and self._unreachable_nodes():
                    # Others may be about to say the same.
                    deadline = min(deadline, time.monotonic() + SECONDS_TO_CONNECT)
                time.sleep(0.2)
            if there:
                said[rank] = json.loads(self.store.get(key))
            else:
                node = self.nodes[rank] if self.nodes else self.job.name(rank)
                silent[node] = f"it stopped answering in {phase}: no answer within {seconds:.0f} seconds"
        self._listeners = len(said) - 1
        return said, silent

    def _unreachable_nodes(self) -> list[Report]:
        texts = [_read(path) for path in sorted(self.job.folder.glob(f"unreachable_*.{self.job.token}"))]
        return [Report(**json.loads(text)) for text in texts if text]

    def close(self) -> None:
        """Wait until the other nodes have heard the last decision, and close the store, whose port training uses."""
        self._server.close()
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        if self.job.rank == 0:
            while self.store.add("left", 0) < self._listeners and time.monotonic() < deadline:
                time.sleep(0.1)
        del self.store


def listen_at(port: int) -> socket.socket:
    """A socket that accepts connections at a port (any free one if 0), over IPv4 and IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)


def _store(host: str, port: int, **options: Any) -> TCPStore:
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=SECONDS_TO_ANSWER), **options)


def _listen(job: Job) -> tuple[TCPStore, str]:
    # The processes of a single node meet elsewhere.
    host, port = (job.host, job.port) if job.num_nodes > 1 else ("localhost", 0)
    try:
        server = listen_at(port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        remedy = "start the job again, which chooses another port, or set LARGEBATCH_PORTS to a range that is free"
        problem = f"port {port} on {host} cannot be used ({reason}): {remedy}"
        conclude(job, Verdict({}, [problem], []))
    port = server.getsockname()[1]
    try:
        store = _store(host, port, is_master=True, master_listen_fd=server.detach())
    except RuntimeError as error:
        problem = f"{job.node} cannot connect to itself as {host}:{port}: {reason_of(error)}"
        conclude(job, Verdict({}, [f"{problem}; is that the first node's address?"], []))
    _write(job.file("listening"), "")
    return store, host


def _connect(job: Job) -> tuple[TCPStore, str]:
    deadline = time.monotonic() + job.seconds
    while True:
        try:
            with socket.create_connection((job.host, job.port), SECONDS_TO_CONNECT) as connection:
                address = connection.getsockname()[0]
            break
        except OSError as error:
            reason = reason_of(error)
        _leave_if_ended(job)
        if job.file("listening").exists():
            deadline = min(deadline, time.monotonic() + SECONDS_UNREACHABLE)
        if time.monotonic() > deadline:
            _say_unreachable(job, reason)
        time.sleep(0.5)
    # In a thread, because this may never return if another program listens there and says nothing.
    made: Queue[TCPStore | RuntimeError] = Queue()

    def put_store() -> None:
        try:
            made.put(_store(job.host, job.port, is_master=False))
        except RuntimeError as error:
            made.put(error)

    Thread(target=put_store, daemon=True).start()
    deadline = time.monotonic() + SECONDS_TO_ANSWER
    reason = "it does not answer"
    while True:
        with suppress(Empty):
            store = made.get(timeout=0.2)
            if not isinstance(store, RuntimeError):
                return store, address
            reason = reason_of(store)
        _leave_if_ended(job)
        if time.monotonic() > deadline:
            _say_unreachable(job, f"another program uses that port: {reason}")


def _leave_if_ended(job: Job) -> None:
    if code := _read(job.file("ended")):
        print(f"{job.node}: the pre-flight ended before this node was present; see above", file=sys.stderr, flush=True)
        raise Ended(int(code))


def _say_unreachable(job: Job, reason: str) -> NoReturn:
    place = f"{job.host}:{job.port}"
    try:
        found = socket.getaddrinfo(job.host, job.port, type=socket.SOCK_STREAM)
        place += f" ({', '.join(sorted({str(each[4][0]) for each in found}))})"
    except OSError:
        place += " (the name is unknown)"
    report = Report(job.node, unreachable=[(job.name(0) if job.names else job.host, place, reason)])
    _write(job.file(f"unreachable_{job.rank}"), json.dumps(asdict(report)))
    _give_up(job, f"cannot connect to the first node at {place}: {reason}")


def _write(path: Path, text: str) -> None:
    # The checks report a folder that cannot be written.
    with suppress(OSError):
        replace_file(path, [memoryview(text.encode())])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
