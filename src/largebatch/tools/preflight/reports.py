"""How the nodes of a job agree: by files in a folder that all of them see.

In a phase every node writes a report. The first node waits for all of them until a deadline, prints what was found, and
writes its decision, for which the others wait.
"""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from largebatch.errors import UserError, reason_of
from largebatch.storage.files import replace_file
from largebatch.words import counted

PRESENCE = "presence"  # the first phase: who misses its deadline is late, but not bad
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_IN_ALL = 580.0  # how long the other phases may take; launch/node.sh ends the pre-flight after 600


class Severity(IntEnum):
    """What a finding means. The largest is the exit code of the pre-flight on every node."""

    NOTE = 0
    REFUSED = 2  # the job must not start, whatever nodes it has
    BAD_NODE = 3  # the job must not run on this node


LABELS = {Severity.NOTE: "", Severity.REFUSED: "error on ", Severity.BAD_NODE: "bad node "}


@dataclass(frozen=True)
class Node:
    """This node, and the facts about the job that it must know."""

    name: str
    rank: int  # from 0
    num_nodes: int
    recipe: Path
    accelerate_config: Path
    folder: Path  # a folder that all nodes share
    token: str  # different for each start
    host: str  # the first node, where the processes of the job will meet
    port: int
    gpus: int  # GPUs that the job was given on each node; 0 for a job on CPUs
    seconds: float  # how long to wait until all nodes are present
    names: Sequence[str]  # all nodes in order
    min_busbw: float = 0.0  # the bus bandwidth in GB/s that the job needs
    began: float = field(default_factory=time.monotonic)

    @property
    def processes(self) -> int:
        """The processes that take part in the all-reduce on each node."""
        return self.gpus or 1

    def file(self, name: str) -> Path:
        """A file of this start. Its name depends on the token, but does not disclose it."""
        return self.folder / f"{name}.{hashlib.sha256(self.token.encode()).hexdigest()[:16]}"


@dataclass
class Report:
    """What one node tells the first one."""

    node: str
    findings: dict[str, Severity] = field(default_factory=dict)  # sentences
    # What must be the same everywhere, by name: versions, checksums of the code and the recipe, GPUs, limits.
    versions: dict[str, str] = field(default_factory=dict)
    failed_at: float = 0.0  # when its part of the all-reduce failed, in seconds since 1970


def agree(node: Node, phase: str, report: Report, deadline: float) -> int:
    """Report to the first node, and wait for its decision.

    Args:
        node: This node.
        phase: Different each time; named in messages and files.
        report: What this node found.
        deadline: Until when the first node waits for all nodes, as time.monotonic tells it.

    Returns:
        The decision, which is the same on all nodes: 0, or the exit code with which the pre-flight is over.

    Raises:
        UserError: The folder cannot be written.
    """
    mine = node.file(f"{phase}_{node.rank}")
    decision = node.file(f"{phase}_decision")
    text = json.dumps(asdict(report))
    _write(mine, text)
    if node.rank == 0:
        code = _conclude(node, _collect(node, phase, deadline))
        _write(decision, str(code))
        return code
    while decision.name not in (names := _names_in(node.folder)):
        # The first node empties the folder when it starts; this report may have been there before.
        if names and mine.name not in names:
            _write(mine, text)
        waited = time.monotonic() - node.began
        is_late = waited > node.seconds and node.file(f"{PRESENCE}_0").name not in names
        if is_late or waited > node.seconds + SECONDS_IN_ALL:
            # Otherwise the first node, if it comes after all, would count this one as present.
            mine.unlink(missing_ok=True)
            return _conclude(node, [_missing(node, phase, 0)])
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return int(decision.read_text(encoding="utf-8"))


def nodes_by_finding(reports: Sequence[Report]) -> Mapping[tuple[Severity, str], list[str]]:
    """The nodes that have each finding, among them versions that differ from those of most nodes.

    In a tie, those of the first report are right. The failures that were noticed first come first, because other nodes
    may only have waited.
    """
    nodes: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.failed_at):
        for text, severity in report.findings.items():
            nodes[severity, text].append(report.node)
    # Nodes whose checks failed have no versions to compare.
    compared = [report for report in reports if report.versions]
    for name in dict.fromkeys(name for report in compared for name in report.versions):
        values = [report.versions.get(name, "missing") for report in compared]
        # In a tie, `most_common` takes the value that it met first.
        usual, count = Counter(values).most_common(1)[0]
        for report, value in zip(compared, values, strict=True):
            if value != usual:
                text = f"{name} is {value}, but {usual} on {counted(count, 'node')}"
                nodes[Severity.BAD_NODE, text].append(report.node)
    return nodes


def _collect(node: Node, phase: str, deadline: float) -> list[Report]:
    """The reports of all nodes in order, for the first node; of those that are late, a report that says so."""
    files = [node.file(f"{phase}_{rank}") for rank in range(node.num_nodes)]
    expected = {file.name for file in files}
    while expected - (names := _names_in(node.folder)) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return [
        _read(node, phase, rank, file) if file.name in names else _missing(node, phase, rank)
        for rank, file in enumerate(files)
    ]


def _read(node: Node, phase: str, rank: int, file: Path) -> Report:
    try:
        return TypeAdapter(Report).validate_json(file.read_bytes(), strict=True)
    except ValidationError:
        unreadable = f"its report in {phase} cannot be read; it runs another version of largebatch"
        return Report(node.names[rank], {unreadable: Severity.BAD_NODE})


def _missing(node: Node, phase: str, rank: int) -> Report:
    """What is said of a node that does not report."""
    if phase != PRESENCE:
        return Report(node.names[rank], {f"it stopped answering in {phase}": Severity.BAD_NODE})
    late = (
        f"late: not present in {node.folder.resolve()} after {node.seconds:.0f} seconds; if nodes need longer to "
        "start, raise LARGEBATCH_PREFLIGHT_SECONDS"
    )
    return Report(node.names[rank], {late: Severity.REFUSED})


def _conclude(node: Node, reports: Sequence[Report]) -> int:
    """Print the findings, write the bad nodes to a file for the batch script, and return the exit code."""
    code = Severity.NOTE
    bad_nodes: dict[str, None] = {}
    for (severity, text), nodes in sorted(nodes_by_finding(reports).items(), key=lambda finding: finding[0][0]):
        if severity == Severity.BAD_NODE and len(nodes) >= max(2, node.num_nodes - 1):
            # What all others have, too, is not the fault of a node.
            severity = Severity.REFUSED
        elif severity == Severity.BAD_NODE:
            bad_nodes |= dict.fromkeys(nodes)
        code = max(code, severity)
        print(f"  {LABELS[severity]}{', '.join(nodes)}: {text}", flush=True)
    if bad_nodes:
        _write(node.folder / "bad_nodes", ",".join(bad_nodes) + "\n")
    return code


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
