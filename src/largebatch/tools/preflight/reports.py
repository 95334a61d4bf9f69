"""How the nodes of a job agree: by files in a folder that all of them see.

In a phase every node writes a report. The first node waits for all of them until a deadline, decides, and writes its
decision, for which the others wait.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from largebatch.errors import UserError, reason_of
from largebatch.storage.files import replace_file
from largebatch.tools.preflight.verdict import GOOD, Findings, Verdict, judge

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_IN_ALL = 550.0  # how long the phases after the first one may take; launch/node.sh ends the pre-flight after 600


@dataclass(frozen=True)
class Node:
    """This node, and the facts about the job that it must know."""

    name: str
    rank: int  # from 0
    num_nodes: int
    folder: Path  # a folder that all nodes share
    token: str  # different for each start
    host: str  # the first node, where the processes of the job will meet
    port: int
    gpus: int  # GPUs that the job was given on each node; 0 for a job on CPUs
    seconds: float  # how long to wait until all nodes are present
    names: tuple[str, ...] = ()  # all nodes in order, if known
    began: float = field(default_factory=time.monotonic)

    @property
    def processes(self) -> int:
        """The processes that take part in the all-reduce on each node."""
        return self.gpus or 1

    def file(self, name: str) -> Path:
        """A file of this start. Its name depends on the token, but does not disclose it."""
        return self.folder / f"{name}.{hashlib.sha256(self.token.encode()).hexdigest()[:16]}"

    def name_of(self, rank: int) -> str:
        """The name of a node, which has reported its presence if names are not known."""
        if self.names:
            return self.names[rank]
        present = Findings.read(_read(self.file(f"presence_{rank}")))
        return present.node if present else f"node {rank}"


class Ended(Exception):
    """The pre-flight is over for this node, with an exit code."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


def report(
    node: Node,
    phase: str,
    findings: Findings,
    deadline: float,
    judge: Callable[[Sequence[Findings], Mapping[str, str]], Verdict] = judge,
) -> None:
    """Report this node's findings to the first node, and wait for its decision.

    Args:
        node: This node.
        phase: Different each time; named in messages and files.
        findings: What this node found.
        deadline: Until when the first node waits for all nodes, as time.monotonic tells it.
        judge: Called on the first node only, with the findings in the order of the nodes, and the nodes that did not
            report, with the reason.

    Raises:
        Ended: The pre-flight is over, with the same exit code on all nodes.
        UserError: The folder cannot be written.
    """
    mine = node.file(f"{phase}_{node.rank}")
    text = json.dumps(asdict(findings))
    _write(mine, text)
    if node.rank == 0:
        code = conclude(node, judge(*_collect(node, phase, deadline)))
        _write(node.file(f"{phase}_decision"), str(code))
    else:
        decision = node.file(f"{phase}_decision")
        while decision.name not in (names := _names_in(node.folder)):
            # When the first node starts, it removes what is there, and writes something else.
            if names and mine.name not in names:
                _write(mine, text)
            _give_up_in_time(node, phase, mine)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        code = int(decision.read_text(encoding="utf-8"))
    if code != GOOD:
        raise Ended(code)


def conclude(node: Node, verdict: Verdict) -> int:
    """Print the verdict, write the bad nodes to a file for the batch script, and return the exit code."""
    for line in verdict.lines():
        print(line, flush=True)
    if verdict.bad_nodes:
        _write(node.folder / "bad_nodes", ",".join(verdict.bad_nodes) + "\n")
    return verdict.exit_code


def _collect(node: Node, phase: str, deadline: float) -> tuple[list[Findings], dict[str, str]]:
    """The findings that have arrived by the deadline, and why those of other nodes have not, by their names."""
    files = [node.file(f"{phase}_{rank}") for rank in range(node.num_nodes)]
    while not {file.name for file in files} <= _names_in(node.folder):
        if time.monotonic() > deadline:
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    found = []
    silent = {}
    for rank, file in enumerate(files):
        text = _read(file)
        findings = Findings.read(text)
        if findings:
            found.append(findings)
        elif text:
            problem = f"its report in {phase} cannot be read; it runs another version of largebatch"
            found.append(Findings(node.name_of(rank), problems=[problem]))
        else:
            silent[node.name_of(rank)] = f"it stopped answering in {phase}"
    return found, silent


def _give_up_in_time(node: Node, phase: str, mine: Path) -> None:
    """End the pre-flight on a node that has waited too long for the first node.

    A first node that is late does not find the report of a node that has left.
    """
    waited = time.monotonic() - node.began
    if waited > node.seconds and not node.file("presence_0").exists():
        problem = (
            f"late: {node.name_of(0)}: {node.name} has not seen it in {node.folder.resolve()} after "
            f"{node.seconds:.0f} seconds; if it needs longer to start, raise LARGEBATCH_PREFLIGHT_SECONDS"
        )
        mine.unlink(missing_ok=True)
        raise Ended(conclude(node, Verdict(problems=[problem])))
    if waited > node.seconds + SECONDS_IN_ALL:
        reason = f"{node.name} waited in {phase}, and did not hear from it any more"
        raise Ended(conclude(node, Verdict({node.name_of(0): [reason]})))


def _names_in(folder: Path) -> set[str]:
    """The names of the files; on network file systems, a look for a single file may miss it for a minute."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, [memoryview(text.encode())])
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason_of(error)}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
