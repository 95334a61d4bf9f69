"""Nodes of a pre-flight as processes of this machine, forked, so that none has to import torch."""

import os
import random
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from largebatch.__main__ import main
from largebatch.tools.preflight.reports import Node
from paths import ACCELERATE_CONFIGS, PYDOC

DDP = ACCELERATE_CONFIGS["ddp"]
TOKEN = "a-token"


@dataclass(frozen=True)
class Ended:
    """How a node ended."""

    exit_code: int
    out: str
    err: str


def a_node(folder, **changes):
    """The only node of a job, without GPUs."""
    node = Node(
        name="n1",
        rank=0,
        num_nodes=1,
        recipe=PYDOC,
        accelerate_config=DDP,
        folder=folder,
        token="42",
        host="n1",
        port=1,
        gpus=0,
        seconds=1.0,
        names=["n1"],
    )
    return replace(node, **changes)


def free_port():
    """A port that is free on this machine, and not one that the kernel gives to whoever asks for any."""
    while True:
        with socket.socket() as server, suppress(OSError):
            server.bind(("", random.SystemRandom().randrange(10000, 32768)))
            return server.getsockname()[1]


def run_nodes(folder, count, *words, host="localhost", port=None, before=None, seconds=600):
    """Run the command as every node of a job, and return how they ended.

    Args:
        folder: For the files of the job.
        count: Nodes of the job.
        words: Further options.
        host: The host of the rendezvous.
        port: Of the rendezvous; default: a free one.
        before: Called in the process of each node with its rank, before it begins.
        seconds: How long to wait for all of them.
    """
    shared(folder).mkdir(parents=True, exist_ok=True)
    names = [f"n{rank + 1}" for rank in range(count)]
    port = port or free_port()
    processes = []
    for rank, name in enumerate(names):
        arguments = ["preflight", str(PYDOC), f"--accelerate-config={DDP}", "--gpus=0"]
        arguments += [f"--node-rank={rank}", f"--num-nodes={count}", f"--address={host}", f"--port={port}"]
        arguments += [f"--seconds={seconds}", *words]
        environment = {"LARGEBATCH_TOKEN": TOKEN, "LARGEBATCH_LOGS": str(shared(folder).parent)}
        environment |= {"LARGEBATCH_NODE": name, "LARGEBATCH_NODE_NAMES": ",".join(names)}
        process = os.fork()
        if not process:
            _be_node(folder, rank, arguments, before, environment)
        processes.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    return [
        Ended(code, (folder / f"out_{rank}").read_text(), (folder / f"err_{rank}").read_text())
        for rank, code in enumerate(codes)
    ]


def _be_node(folder, rank, arguments, before, environment):
    code = 99
    try:
        os.environ.update(environment)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        # pytest has its own.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        if before:
            before(rank)
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die(*_, **__):
    """Be gone at once."""
    os._exit(9)


def late(rank, seconds):
    """A `before` that lets a node begin late."""
    return lambda each: time.sleep(seconds) if each == rank else None


def begins_after(folder, rank, name):
    """A `before` that lets a node begin when there is a file of this name in the shared folder."""

    def wait(each):
        if each == rank:
            while not list(shared(folder).glob(f"{name}.*")):
                time.sleep(0.1)

    return wait


def shared(folder: Path) -> Path:
    """The folder that the nodes share."""
    return folder / "logs/preflight"
