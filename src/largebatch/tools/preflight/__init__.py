"""`largebatch preflight`, which launch/node.sh runs on every node of a job before training."""

import argparse
import os
from pathlib import Path

from largebatch.errors import UserError
from largebatch.system.endings import node_name
from largebatch.tools.options import add_recipe_file, positive_int

EPILOG = (
    "launch/node.sh runs it, and sets LARGEBATCH_NODE, LARGEBATCH_NODE_NAMES, LARGEBATCH_LOGS and "
    "LARGEBATCH_TOKEN.\ndocs/slurm.md says what it finds. Exit code 3: there are bad nodes."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe_file(parser)
    parser.add_argument("--accelerate-config", type=Path, required=True, help="the strategy's YAML file")
    parser.add_argument("--node-rank", type=int, required=True, help="the number of this node, from 0")
    parser.add_argument("--num-nodes", type=positive_int, required=True, help="number of nodes of the job")
    parser.add_argument("--address", required=True, help="of the first node, where the processes will meet")
    parser.add_argument("--port", type=int, required=True, help="where they will meet")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of each node; 0 for a job on CPUs")
    parser.add_argument("--seconds", type=float, required=True, help="how long to wait until all nodes are present")
    parser.add_argument("--min-busbw", type=float, default=0.0, help="GB/s that the all-reduce must reach; default: 0")


def run(options: argparse.Namespace) -> int:
    # Not options, because everybody on a node can see the words of a command.
    """Run on every node of a job: compare their software, GPUs and limits, check the shared run folder, connect the
    nodes, and measure an all-reduce. The first node prints what was found.
    """
    token = os.environ.get("LARGEBATCH_TOKEN")
    logs = os.environ.get("LARGEBATCH_LOGS")
    if not token or not logs:
        raise UserError("LARGEBATCH_TOKEN or LARGEBATCH_LOGS is not set; run launch/node.sh, which sets both")
    from largebatch.tools.preflight.phases import preflight
    from largebatch.tools.preflight.reports import Node

    names = os.environ.get("LARGEBATCH_NODE_NAMES")
    node = Node(
        name=node_name(),
        rank=options.node_rank,
        num_nodes=options.num_nodes,
        recipe=options.config,
        accelerate_config=options.accelerate_config,
        folder=Path(logs, "preflight"),
        token=token,
        host=options.address.strip("[]"),
        port=options.port,
        gpus=options.gpus,
        seconds=options.seconds,
        names=names.split(",") if names else [f"node {rank}" for rank in range(options.num_nodes)],
        min_busbw=options.min_busbw,
    )
    return preflight(node)
