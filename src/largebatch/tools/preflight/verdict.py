"""Finds the bad nodes, given all nodes' reports."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.errors import counted
from largebatch.tools.preflight.report import Report


@dataclass(frozen=True)
class Verdict:
    """Whether a job may start, and why not."""

    bad_nodes: dict[str, list[str]]  # nodes that it should not run on, with the reasons
    problems: list[str]  # what is no node's fault
    notes: list[str]  # what was measured


def judge(reports: Sequence[Report], nodes: Sequence[str]) -> Verdict:
    """Compare the reports that arrived from the job's nodes, of which the first is named first.

    What most nodes have is taken to be right; in a tie, what the first node has.
    """
    by_node = {report.node: report for report in reports}
    present = [by_node[node] for node in nodes if node in by_node]
    bad: dict[str, list[str]] = {node: ["it did not answer"] for node in nodes if node not in by_node}
    bad |= {report.node: [*report.problems] for report in present if report.problems}
    for node, difference in _differing_versions(present):
        bad.setdefault(node, []).append(difference)
    # A node known to be bad explains failed connections to it and from it.
    edges = [
        (report.node, node, port)
        for report in present
        for node, port in report.unreachable
        if node not in bad and report.node not in bad
    ]
    for node, reason in _unreachable_nodes(edges):
        bad.setdefault(node, []).append(reason)

    problems = sorted({text for report in present for text in (report.refusal, report.disk_problem) if text})
    notes = [text for report in present for text in (report.all_reduce, report.disk_note) if text]
    errors = [report.all_reduce_error for report in present if report.all_reduce_error]
    if errors:
        (notes if bad else problems).append(f"the all-reduce over all nodes failed: {errors[0]}")
    return Verdict(bad, problems, notes)


def _differing_versions(reports: Sequence[Report]) -> list[tuple[str, str]]:
    names = dict.fromkeys(name for report in reports for name in report.versions)
    differing = []
    for name in names:
        values = [report.versions.get(name, "missing") for report in reports]
        # In a tie, `most_common` takes the value that it met first: the first node's.
        usual = Counter(values).most_common(1)[0][0]
        differing += [
            (report.node, f"{name} is {value}, but {usual} on {counted(values.count(usual), 'node')}")
            for report, value in zip(reports, values, strict=True)
            if value != usual
        ]
    return differing


def _unreachable_nodes(edges: Sequence[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """The fewest nodes that explain which connections fail; in a tie, the target of the connection."""
    named = []
    left = list(edges)
    while left:
        count = Counter(node for edge in left for node in edge[:2])
        worst = max(count, key=lambda node: (count[node], node in {target for _, target, _ in left}))
        mine = [edge for edge in left if worst in edge[:2]]
        source, target, port = mine[0]
        more = f" (and {len(mine) - 1} more connections)" if len(mine) > 1 else ""
        named.append((worst, f"{source} cannot connect to {target} on port {port}{more}: blocked, or no route"))
        left = [edge for edge in left if worst not in edge[:2]]
    return named
