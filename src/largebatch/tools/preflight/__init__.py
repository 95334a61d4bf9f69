"""`largebatch preflight`, which launch/node.sh runs on every node of a job before training."""

import argparse
import os
from pathlib import Path

from largebatch.errors import UserError
from largebatch.tools.options import (
    Commands,
    add_command,
    add_options_of_a_run,
    add_recipe,
    positive_float,
    positive_int,
    words,
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "preflight",
        run,
        description="Run on every node of a job: compare their software, GPUs and limits, check the shared run folder, "
        "connect the nodes, and measure an all-reduce. The first node prints the verdict.",
        epilog="launch/node.sh runs it; docs/preflight.md says what it finds. Exit code 3: there are bad nodes.",
        takes_overrides=True,
    )
    add_recipe(parser)
    parser.add_argument("--accelerate-config", type=Path, required=True, help="the strategy's YAML file")
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="a folder that all nodes share, with a file `token` in it that says what LARGEBATCH_TOKEN does",
    )
    parser.add_argument("--node", required=True, help="the name of this node")
    parser.add_argument("--node-rank", type=int, required=True, help="the number of this node, from 0")
    parser.add_argument("--num-nodes", type=positive_int, required=True, help="number of nodes of the job")
    parser.add_argument(
        "--rendezvous", type=_place, required=True, metavar="HOST:PORT", help="where the processes will meet"
    )
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of each node; 0 for a job on CPUs")
    parser.add_argument("--processes-per-node", type=positive_int, required=True, help="processes of the job per node")
    parser.add_argument("--nodes", type=words, default=[], help="names of all nodes, in order, separated by commas")
    add_options_of_a_run(parser)


def run(options: argparse.Namespace) -> int:
    mode = os.environ.get("LARGEBATCH_PREFLIGHT", "on")
    if mode not in ("on", "warn", "off"):
        raise UserError(f"LARGEBATCH_PREFLIGHT={mode}: write on, warn or off")
    seconds = _number("LARGEBATCH_PREFLIGHT_SECONDS", 600)
    minimum = _number("LARGEBATCH_MIN_BUSBW", 0)
    if mode == "off":
        return 0
    # Not an option, because everybody on a node can see the words of a command.
    token = os.environ.get("LARGEBATCH_TOKEN")
    if not token:
        raise UserError("LARGEBATCH_TOKEN is not set; set it to the content of the file `token` in --folder")
    from largebatch.tools.preflight.meeting import Node
    from largebatch.tools.preflight.phases import preflight

    host, port = options.rendezvous
    node = Node(
        name=options.node,
        rank=options.node_rank,
        num_nodes=options.num_nodes,
        folder=options.folder,
        token=token,
        host=host,
        port=port,
        gpus=options.gpus,
        processes_per_node=options.processes_per_node,
        seconds=seconds,
        names=tuple(options.nodes),
        only_warns=mode == "warn",
    )
    return preflight(node, options.config, options.accelerate_config, options.overrides, minimum)


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT; write h1:29500, or [::1]:29500")
    return host.strip("[]"), int(port)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        return positive_float(text) if float(text) else 0.0
    except (ValueError, argparse.ArgumentTypeError):
        raise UserError(f"{name}={text}: write a positive number") from None
