"""`largebatch preflight`, which slurm/launch.sh runs on every node, and `preflight-verdict` on what they print."""

import argparse
import os
from pathlib import Path

from largebatch.errors import LaunchError
from largebatch.tools.options import Commands, add_command, add_options_of_a_run, add_recipe, positive_int, words

GOOD, REFUSED, BAD_NODES = 0, 2, 3


def add_parser(commands: Commands) -> None:
    """Declare both commands."""
    parser = add_command(
        commands,
        "preflight",
        run,
        help="check a node before a Slurm job trains on it",
        description="Print what this node finds: versions, GPUs, the shared run folder, connections to the other nodes "
        "and an all-reduce with them.",
        epilog="slurm/launch.sh runs it on every node of a job; docs/slurm.md says what it finds.",
        takes_overrides=True,
    )
    add_recipe(parser)
    parser.add_argument("--accelerate-config", type=Path, required=True, help="the strategy's YAML file")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--token", required=True, help="the content of the file `token` in that folder")
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="where the processes will meet")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of each node; 0 for a job on CPUs")
    parser.add_argument("--world-size", type=positive_int, required=True, help="processes of the job")
    add_options_of_a_run(parser)

    parser = add_command(
        commands,
        "preflight-verdict",
        run_verdict,
        help="name the bad nodes, given what all nodes found",
        description="Compare the nodes' reports. Exit code 3 if there are bad nodes.",
        epilog="slurm/launch.sh runs it once `preflight` has run on every node.",
    )
    parser.add_argument("reports", type=Path, help="file with what the nodes printed")
    parser.add_argument("--nodes", type=words, required=True, help="the job's nodes, separated by commas")
    parser.add_argument("--bad-nodes", type=Path, required=True, help="file to write the names of bad nodes to")


def run(options: argparse.Namespace) -> int:
    """Check this node and print what was found."""
    from largebatch.tools.preflight.node import Job, check_node
    from largebatch.tools.preflight.report import report_lines

    try:
        node, rank, num_nodes = (os.environ[f"SLURM{name}"] for name in ("D_NODENAME", "_NODEID", "_STEP_NUM_NODES"))
    except KeyError as error:
        raise LaunchError(
            f"{error.args[0]} is not set: run it with srun, one task per node, as slurm/launch.sh does"
        ) from None
    host, port = options.rendezvous.rsplit(":", 1)
    job = Job(
        node,
        int(rank),
        int(num_nodes),
        options.folder,
        options.token,
        host,
        int(port),
        options.gpus,
        options.world_size,
    )
    report = check_node(job, options.config, options.accelerate_config, options.overrides)
    print("\n".join(report_lines(report)), flush=True)
    return GOOD


def run_verdict(options: argparse.Namespace) -> int:
    """Print what all reports show, and write the names of bad nodes into a file, separated by commas.

    Returns:
        The exit code: 0 the job may start, 2 there is a problem that is no node's fault, 3 there are bad nodes.
    """
    from largebatch.errors import counted
    from largebatch.tools.preflight.report import read_reports
    from largebatch.tools.preflight.verdict import judge

    text = options.reports.read_text(encoding="utf-8", errors="replace")
    verdict = judge(read_reports(text.splitlines()), options.nodes)
    print(f"Pre-flight on {counted(len(options.nodes), 'node')}: {', '.join(options.nodes)}")
    for note in verdict.notes:
        print(f"  {note}")
    for node, reasons in verdict.bad_nodes.items():
        for reason in reasons:
            print(f"  bad node {node}: {reason}")
    for problem in verdict.problems:
        print(f"  error: {problem}")
    if verdict.bad_nodes:
        options.bad_nodes.write_text(",".join(verdict.bad_nodes) + "\n", encoding="utf-8")
        return BAD_NODES
    return REFUSED if verdict.problems else GOOD
