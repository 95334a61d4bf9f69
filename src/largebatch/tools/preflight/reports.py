"""How the nodes of a job agree: by files in a folder that all of them see.

In a phase every node writes a report. The first node waits for all of them until a deadline, decides, and writes its
decision, for which the others wait.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from largebatch.errors import UserError, reason_of
from largebatch.storage.files import replace_file
from largebatch.tools.preflight.verdict import Findings, Verdict, compare

PRESENCE = "presence"  # the first phase: who misses its deadline is late, but not bad
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_IN_ALL = 550.0  # how long the other phases may take; launch/node.sh ends the pre-flight after 600


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
        """The name of a node, or its number if names are not known."""
        return self.names[rank] if self.names else f"node {rank}"


def report(node: Node, phase: str, findings: Findings, deadline: float) -> int:
    """Report this node's findings to the first node, and wait for its decision.

    Args:
        node: This node.
        phase: Different each time; named in messages and files.
        findings: What this node found.
        deadline: Until when the first node waits for all nodes, as time.monotonic tells it.

    Returns:
        The decision, which is the same on all nodes: GOOD, or the exit code with which the pre-flight is over.

    Raises:
        UserError: The folder cannot be written.
    """
    mine = node.file(f"{phase}_{node.rank}")
    decision = node.file(f"{phase}_decision")
    text = json.dumps(asdict(findings))
    _write(mine, text)
    if node.rank == 0:
        code = _conclude(node, _judge(node, phase, deadline))
        _write(decision, str(code))
        return code
    while decision.name not in (names := _names_in(node.folder)):
        # When the first node starts, it removes what is there, and writes something else.
        if names and mine.name not in names:
            _write(mine, text)
        waited = time.monotonic() - node.began
        if waited > node.seconds and node.file(f"{PRESENCE}_0").name not in names:
            # If the first node comes after all, it does not take this one for present.
            mine.unlink(missing_ok=True)
            return _conclude(node, Verdict(problems=[_late(node, [node.name_of(0)])]))
        if waited > node.seconds + SECONDS_IN_ALL:
            return _conclude(node, Verdict({node.name_of(0): [_silence(phase)]}))
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return int(decision.read_text(encoding="utf-8"))


def _judge(node: Node, phase: str, deadline: float) -> Verdict:
    """On the first node: whether the job may start, from the reports that arrive until the deadline."""
    files = [node.file(f"{phase}_{rank}") for rank in range(node.num_nodes)]
    expected = {file.name for file in files}
    while expected - (names := _names_in(node.folder)) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    found: list[Findings] = []
    missing: list[str] = []
    for rank, file in enumerate(files):
        if file.name not in names:
            missing.append(node.name_of(rank))
            continue
        unreadable = f"its report in {phase} cannot be read; it runs another version of largebatch"
        findings = Findings.read(file.read_text(encoding="utf-8"))
        found.append(findings or Findings(node.name_of(rank), problems=[unreadable]))
    verdict = compare(found)
    if missing and phase == PRESENCE:
        verdict.problems.append(_late(node, missing))
    elif missing:
        verdict.bad_nodes.update({name: [_silence(phase)] for name in missing})
    return verdict


def _late(node: Node, names: Sequence[str]) -> str:
    return (
        f"late: {', '.join(names)}: not present in {node.folder.resolve()} after {node.seconds:.0f} seconds; if nodes "
        "need longer to start, raise LARGEBATCH_PREFLIGHT_SECONDS"
    )


def _silence(phase: str) -> str:
    return f"it stopped answering in {phase}"


def _conclude(node: Node, verdict: Verdict) -> int:
    """Print the verdict, write the bad nodes to a file for the batch script, and return the exit code."""
    for line in verdict.lines():
        print(line, flush=True)
    if verdict.bad_nodes:
        _write(node.folder / "bad_nodes", ",".join(verdict.bad_nodes) + "\n")
    return verdict.exit_code


def _names_in(folder: Path) -> set[str]:
    """The names of the files; on network file systems, a look for a single file may miss it for a minute."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason_of(error)}") from error
