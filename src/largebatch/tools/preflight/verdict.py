"""Finds the bad nodes, given what the nodes reported."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from largebatch.errors import counted
from largebatch.tools.preflight.report import Report

GOOD, REFUSED, BAD_NODES = 0, 2, 3
FALLS_SHORT = 0.5  # a node is bad if it has less than this share of what nodes usually have


@dataclass(frozen=True)
class Verdict:
    """Whether a job may start, and why not."""

    bad_nodes: dict[str, list[str]]  # nodes that it should not run on, with the reasons
    problems: list[str]  # what is not the fault of a node
    notes: list[str]  # what was measured

    @property
    def exit_code(self) -> int:
        """The exit code of the command on every node."""
        return BAD_NODES if self.bad_nodes else REFUSED if self.problems else GOOD

    def lines(self) -> Iterator[str]:
        """What is printed."""
        yield from (f"  {note}" for note in self.notes)
        for node, reasons in self.bad_nodes.items():
            yield from (f"  bad node {node}: {reason}" for reason in reasons)
        yield from (f"  error: {problem}" for problem in self.problems)


def judge(reports: Sequence[Report], silent: Mapping[str, str] | None = None) -> Verdict:
    """Compare the reports that arrived, in the order of the nodes; `silent` nodes did not report, for a given reason.

    What most nodes have is taken to be right; in a tie, what the first node has.
    """
    bad: dict[str, list[str]] = {node: [reason] for node, reason in (silent or {}).items()}
    bad |= {report.node: [*report.problems] for report in reports if report.problems}
    for node, difference in (*_differing_versions(reports), *_small_amounts(reports)):
        bad.setdefault(node, []).append(difference)
    # A node known to be bad explains failed connections to it and from it.
    edges = [
        (report.node, node, f"at {place} ({reason})")
        for report in reports
        for node, place, reason in report.unreachable
        if node not in bad and report.node not in bad
    ]
    for node, reason in _unreachable_nodes(edges):
        bad.setdefault(node, []).append(reason)
    problems = sorted({text for report in reports for text in report.refusals})
    return Verdict(bad, problems, [text for report in reports for text in report.notes])


def _differing_versions(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name for report in reports for name in report.versions):
        values = [report.versions.get(name, "missing") for report in reports]
        # In a tie, `most_common` takes the value that it met first: the first node's.
        usual = Counter(values).most_common(1)[0][0]
        for report, value in zip(reports, values, strict=True):
            if value != usual:
                yield report.node, f"{name} is {value}, but {usual} on {counted(values.count(usual), 'node')}"


def _small_amounts(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name for report in reports for name in report.amounts):
        usual = median_high(report.amounts.get(name, 0) for report in reports)
        for report in reports:
            if (amount := report.amounts.get(name, 0)) < FALLS_SHORT * usual:
                yield report.node, f"{name} is {amount:.4g}, but {usual:.4g} on other nodes"


def _unreachable_nodes(edges: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """The fewest nodes that explain which connections fail; in a tie, the target of the connection."""
    left = list(edges)
    while left:
        count = Counter(node for edge in left for node in edge[:2])
        worst = max(count, key=lambda node: (count[node], node in {target for _, target, _ in left}))
        mine = [edge for edge in left if worst in edge[:2]]
        source, target, why = mine[0]
        more = f", and {counted(len(mine) - 1, 'more connection')} failed" if len(mine) > 1 else ""
        yield worst, f"{source} cannot connect to {target} {why}{more}"
        left = [edge for edge in left if worst not in edge[:2]]
