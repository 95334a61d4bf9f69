"""`largebatch preflight`, which slurm/launch.sh runs on every node, and `preflight-verdict` on what they print."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import LaunchError
from largebatch.preflight.node import Job, check_node
from largebatch.preflight.report import Report
from largebatch.preflight.verdict import judge

MARK = "largebatch-preflight "
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
    """Look at this node and print what was found, in one line.

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
    print(MARK + json.dumps(report.to_json()), flush=True)


def print_verdict(reports_file: Path, nodes: Sequence[str], bad_nodes_file: Path) -> int:
    """Print what the reports say together; names of bad nodes go into a file, with commas between.

    Returns:
        The exit code: 0 the job may start, 2 something is wrong that no node is to blame for, 3 there are bad nodes.
    """
    lines = reports_file.read_text(encoding="utf-8", errors="replace").splitlines()
    reports = [Report.from_json(json.loads(line.split(MARK, 1)[1])) for line in lines if MARK in line]
    verdict = judge(reports, nodes)
    print(f"Pre-flight on {len(nodes)} nodes: {', '.join(nodes)}")
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
