"""What the nodes found, and which of them are bad."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from largebatch.words import counted

GOOD = 0
REFUSED = 2
BAD_NODES = 3
MAX_FAILURES = 3


@dataclass
class Findings:
    """What one node reports to the first node."""

    node: str
    # What must be the same everywhere, by name: versions, checksums of the code and the recipe, GPUs, limits.
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # what is wrong with this node itself
    refusals: list[str] = field(default_factory=list)  # what is wrong with the job, wherever it runs
    notes: list[str] = field(default_factory=list)  # what was measured
    unreachable: str = ""  # why this node cannot connect to the first one
    failure: str = ""  # why this node's part of the all-reduce failed
    failed_at: float = 0.0  # when it did, in seconds since 1970

    @classmethod
    def read(cls, data: str) -> "Findings | None":
        """What a node reported as JSON; None if that is something else."""
        try:
            return TypeAdapter(cls).validate_json(data, strict=True)
        except ValidationError:
            return None


@dataclass(frozen=True)
class Verdict:
    """Whether a job may start, and why not."""

    bad_nodes: dict[str, list[str]] = field(default_factory=dict)  # nodes that it should not run on, with the reasons
    problems: list[str] = field(default_factory=list)  # what is not the fault of a node
    notes: list[str] = field(default_factory=list)  # what was measured

    @property
    def exit_code(self) -> int:
        """The exit code of the command on every node."""
        return BAD_NODES if self.bad_nodes else REFUSED if self.problems else GOOD

    def lines(self) -> Iterator[str]:
        """The lines that are printed."""
        yield from (f"  {note}" for note in self.notes)
        for node, reasons in self.bad_nodes.items():
            yield from (f"  bad node {node}: {reason}" for reason in reasons)
        yield from (f"  error: {problem}" for problem in self.problems)


def compare(findings: Sequence[Findings]) -> Verdict:
    """Compare the findings that arrived, in the order of the nodes.

    What most nodes have is taken to be right; in a tie, what the first node has.
    """
    bad = {each.node: [*each.problems] for each in findings if each.problems}
    for node, reason in (*_unreachable(findings), *_differing_versions(findings)):
        bad.setdefault(node, []).append(reason)
    problems = sorted({text for each in findings for text in each.refusals})
    problems += _first_failures(findings)
    return Verdict(bad, problems, [text for each in findings for text in each.notes])


def _unreachable(findings: Sequence[Findings]) -> Iterator[tuple[str, str]]:
    """Yield the nodes that cannot connect to the first one, or the first one if nobody can."""
    others = findings[1:]
    cut_off = [each for each in others if each.unreachable]
    for each in cut_off:
        yield (findings[0] if len(cut_off) == len(others) else each).node, f"{each.node} {each.unreachable}"


def _first_failures(findings: Sequence[Findings]) -> Iterator[str]:
    """Yield why the all-reduce failed, by the nodes that noticed it first; the others may only have waited for them."""
    failed = sorted((each for each in findings if each.failure), key=lambda each: each.failed_at)
    for number, each in enumerate(failed[:MAX_FAILURES], 1):
        yield f"failure {number}, on {each.node}: {each.failure}"


def _differing_versions(findings: Sequence[Findings]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name for each in findings for name in each.versions):
        values = [each.versions.get(name, "missing") for each in findings]
        # In a tie, `most_common` takes the value that it met first: the first node's.
        usual = Counter(values).most_common(1)[0][0]
        for each, value in zip(findings, values, strict=True):
            if value != usual:
                yield each.node, f"{name} is {value}, but {usual} on {counted(values.count(usual), 'node')}"
