"""A node's report about itself, and how it reaches the node that judges: in short lines of output."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

MARK = "largebatch-preflight "
LINE = re.compile(rf"{MARK}(\S+) (\d+) (\d+) (.+)")
LINE_BYTES = 800
"""Bytes of a report in one line: srun mixes up lines of different nodes that are longer than 1,024 bytes."""


@dataclass
class Report:
    """The findings of one node."""

    node: str
    # Versions of Python and of packages, and checksums of the code and the recipe, by name.
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # what is wrong with this node itself
    # What it could not connect to: pairs of a node's name and a port.
    unreachable: list[tuple[str, int]] = field(default_factory=list)
    refusal: str = ""  # why the recipe cannot be run on this job at all
    all_reduce: str = ""  # what the all-reduce over all nodes measured
    all_reduce_error: str = ""  # why the all-reduce failed
    disk_problem: str = ""  # why checkpoints do not fit on the disk
    disk_note: str = ""  # what was found otherwise


def report_lines(report: Report) -> list[str]:
    """A report in short lines: the node, the line's number, the number of lines, and a part of the JSON."""
    text = json.dumps(asdict(report))
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return [f"{MARK}{report.node} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


def read_reports(lines: Iterable[str]) -> list[Report]:
    """The complete reports in what nodes have printed, whose lines may be in any order."""
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in lines:
        if match := LINE.search(line):
            node, number, count, part = match.groups()
            found.setdefault(node, {})[int(number)] = part
            counts[node] = int(count)
    reports = []
    for node, parts in found.items():
        # A node that died may have printed a part of its last line.
        with suppress(json.JSONDecodeError):
            if len(parts) == counts[node]:
                reports.append(Report(**json.loads("".join(parts[number] for number in sorted(parts)))))
    return reports
