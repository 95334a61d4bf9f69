"""`largebatch preflight`, which slurm/launch.sh runs on every node, and `preflight-verdict` on what they print."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from largebatch.counted import counted
from largebatch.errors import LaunchError
from largebatch.preflight.node import Job, check_node
from largebatch.preflight.report import Report
from largebatch.preflight.verdict import judge

MARK = "largebatch-preflight "
LINE = re.compile(rf"{MARK}(\S+) (\d+) (\d+) (.+)")
# Of a report, in a line: srun mixes those of several nodes that have more than 1,024 bytes.
LINE_BYTES = 800
GOOD, REFUSED, BAD_NODES = 0, 2, 3


def print_report(
    recipe: Path,
    accelerate_config: Path,
    overrides: Sequence[str],
    folder: Path,
    token: str,
    rendezvous: str,
    gpus: int,
    world_size: int,
) -> None:
    """Look at this node and print what was found.

    Raises:
        LaunchError: This is not a task of a Slurm step.
    """
    try:
        node, rank, num_nodes = (os.environ[f"SLURM{name}"] for name in ("D_NODENAME", "_NODEID", "_STEP_NUM_NODES"))
    except KeyError as error:
        raise LaunchError(
            f"{error.args[0]} is not set: run it by srun, one task a node, as slurm/launch.sh does"
        ) from None
    host, port = rendezvous.rsplit(":", 1)
    job = Job(node, int(rank), int(num_nodes), folder, token, host, int(port), gpus, world_size)
    report = check_node(job, recipe, accelerate_config, overrides)
    print("\n".join(report_lines(report)), flush=True)


def print_verdict(reports_file: Path, nodes: Sequence[str], bad_nodes_file: Path) -> int:
    """Print what the reports say together; names of bad nodes go into a file, with commas between.

    Returns:
        The exit code: 0 the job may start, 2 something is wrong that no node is to blame for, 3 there are bad nodes.
    """
    text = reports_file.read_text(encoding="utf-8", errors="replace")
    verdict = judge(read_reports(text.splitlines()), nodes)
    print(f"Pre-flight on {counted(len(nodes), 'node')}: {', '.join(nodes)}")
    for note in verdict.notes:
        print(f"  {note}")
    for node, reasons in verdict.bad_nodes.items():
        for reason in reasons:
            print(f"  bad node {node}: {reason}")
    for problem in verdict.problems:
        print(f"  error: {problem}")
    if verdict.bad_nodes:
        bad_nodes_file.write_text(",".join(verdict.bad_nodes) + "\n", encoding="utf-8")
        return BAD_NODES
    return REFUSED if verdict.problems else GOOD


def report_lines(report: Report) -> list[str]:
    """A report in short lines: the node, the number of the line and of all, and a part of its JSON."""
    text = json.dumps(report.to_json())
    parts = [text[start : start + LINE_BYTES] for start in range(0, len(text), LINE_BYTES)]
    return [f"{MARK}{report.node} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


def read_reports(lines: Iterable[str]) -> list[Report]:
    """The reports in what nodes have printed, whose lines may be in any order; one that is not whole is none."""
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
                reports.append(Report.from_json(json.loads("".join(parts[number] for number in sorted(parts)))))
    return reports
