"""Jobs of several processes, forked from a server that has already imported what they need.

A new `accelerate launch` spends 10 to 20 s on imports; these jobs start at once. torch's start_processes forks from the
same server, but it waits up to 30 s for the other processes when one has failed, and names only one that failed.
"""

import math
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from largebatch.system.endings import MAX_MESSAGE_CHARS
from largebatch.system.parent_process import end_with_parent

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["largebatch.tools.local_jobs.preload"])

PRELOAD = "LARGEBATCH_PRELOAD"
"""Environment variable with the names of further modules for the server to import, and the paths of those of tasks,
separated by commas."""

LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the network interface on which a library's sockets listen; if empty, its usual one."""

# Time for the other processes of a job to end by themselves after one has failed.
SECONDS_TO_FOLLOW = 1


class Outcome(NamedTuple):
    """How one process ended."""

    failure: str | None  # the traceback or exit code
    value: Any  # the result, without a failure
    moment: float  # when it ended
    exit_code: int = 1
    said: str = ""  # the message of the error that made it exit


class JobFailed(AssertionError):
    """A process of a job raised, exited or did not end in time.

    Args:
        reports: The rank, the traceback or exit code, and the output of each process that failed, in order of failure.
        exit_code: That of the first.
    """

    def __init__(self, reports: Sequence[tuple[int, str, str]], exit_code: int = 1):
        self.reports = list(reports)
        self.exit_code = exit_code
        super().__init__("\n".join(f"--- rank {rank}: {reason}\n{output}" for rank, reason, output in reports))

    def in_one_line(self, folder: Path | None = None) -> str:
        """Why the job failed: the message for the user if there is one.

        Otherwise, the exception of the first traceback, with the last file and line in the task's `folder` that it
        names.
        """
        for _, _, output in self.reports:
            message = re.search(r"^(?:\[rank \d+\] )?error: (.*(?:\n  - .*)*)", output, re.MULTILINE)
            if message:
                return " ".join(line.strip() for line in message[1].splitlines())
        rank, reason, _ = self.reports[0]
        places = re.findall(r'File "(.+)", line (\d+)', reason)
        inside = [f"{file}:{line}" for file, line in places if folder and Path(file).is_relative_to(folder)]
        # The places of a traceback are indented, the exception after them is not.
        last = reason.rpartition("Traceback (most recent call last):\n")[2]
        said = " ".join(re.sub(r"\A(?: .*\n)*", "", last).split())
        return f"rank {rank}: {said[:MAX_MESSAGE_CHARS]}" + (f" ({inside[-1]})" if inside else "")


class JobTimedOut(JobFailed):
    """No process failed, but not all ended in time."""


def preload_tasks(folders: Iterable[Path], *modules: str) -> None:
    """Make the server import modules of tasks, and others, once; call this before the first job."""
    of_tasks = (str(folder.absolute() / module) for folder in folders for module in ("data", "model"))
    os.environ[PRELOAD] = ",".join([*of_tasks, *modules])


def preload_only(*modules: str) -> None:
    """Make the server import nothing but these modules; call this before the first job."""
    _context.set_forkserver_preload(list(modules))


def local_store() -> TCPStore:
    """A store that only processes on this machine can reach: by itself, torch's listens on all interfaces."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def meeting_place(store: TCPStore) -> dict[str, str]:
    """The variables by which processes on this machine find each other.

    As in torch's launcher, their store is hosted here, so no process can look for it too early and wait before it tries
    again.
    """
    return {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run_job(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    world_size: int = 1,
    environment: Mapping[str, str] = {},
    folder: Path | None = None,
    logs: Path | None = None,
) -> list[Any]:
    """Call `function(*arguments)` in every process of a job and return the results by rank.

    Args:
        function: Function that can be pickled, and so can its results.
        arguments: Arguments that can be pickled.
        timeout: Seconds until all results, once the processes have started: the server's imports do not count.
        world_size: Number of processes; if `environment` has a WORLD_SIZE, they get RANK, LOCAL_RANK and a rendezvous.
        environment: Variables added to the environment of this process. Without `INTERFACES` among them, the processes
            cannot be reached from other machines.
        folder: Working directory of the processes; None means that of this one.
        logs: Folder that keeps the processes' output, if it is to be kept.

    Raises:
        JobFailed: A process failed or did not answer in time.
    """
    store = local_store()
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [Path(logs or temporary, f"rank{rank}.log") for rank in range(world_size)]
        processes = []
        pipes = []
        try:
            for rank, output in enumerate(outputs):
                mine, theirs = _context.Pipe(duplex=False)
                settings = dict.fromkeys(INTERFACES, LOOPBACK)
                if "WORLD_SIZE" in environment:
                    settings |= meeting_place(store) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                settings |= environment
                process = _context.Process(
                    target=_work, args=(theirs, output, folder or Path.cwd(), settings, function, arguments)
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            outcomes = _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            # An error keeps this frame, and with it the store, until the garbage collector comes. If that happens in a
            # forked process, such as one that loads data, joining the store's thread aborts it.
            del store
        texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
    reports = []
    for rank, outcome in sorted(outcomes.items(), key=lambda item: item[1].moment):
        if outcome.failure:
            # The output has it, unless the disk is full.
            said = "" if outcome.said in texts[rank] else f": {outcome.said}"
            reports.append((rank, outcome.failure + said, texts[rank]))
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    if reports:
        first, *_ = reports[0]
        reports += [(rank, f"stopped after rank {first} had failed", texts[rank]) for rank in silent]
        raise JobFailed(reports, outcomes[first].exit_code)
    if silent:
        raise JobTimedOut([(rank, f"no result within {timeout:.0f} s", texts[rank]) for rank in silent])
    return [outcomes[rank].value for rank in range(world_size)]


def _collect(pipes: Sequence[Connection], deadline: float) -> dict[int, Outcome]:
    """The outcomes of the processes that answered in time, by rank."""
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    outcomes: dict[int, Outcome] = {}
    patience = math.inf
    while ranks and (ready := wait(list(ranks), timeout=min(patience, deadline - time.monotonic()))):
        for pipe in ranks.keys() & ready:
            try:
                outcome: Outcome = pipe.recv()
            except EOFError:
                outcome = Outcome("the process ended without a result", None, time.time())
            outcomes[ranks.pop(pipe)] = outcome
            if outcome.failure:
                # The others would wait for the one that failed.
                patience = SECONDS_TO_FOLLOW
    return outcomes


def _work(
    pipe: Connection,
    output: Path,
    folder: Path,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    end_with_parent()
    os.environ.update(environment)
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # As in a process of its own: the server's state would give every job the same numbers.
    np.random.seed()
    failure = value = None
    said = ""
    exit_code = 1
    try:
        value = function(*arguments)
    except SystemExit as left:
        failure = f"exit code {left.code}" if left.code else None
        said = str(left.__context__ or "")
        exit_code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        failure = traceback.format_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    with suppress(BrokenPipeError):
        pipe.send(Outcome(failure, value, time.time(), exit_code, said))
    # Skip the interpreter's shutdown: threads of the engines may still wait for processes that failed.
    os._exit(0)
