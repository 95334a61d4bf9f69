"""Jobs of several processes, forked from a server that has already imported the engines.

A new `accelerate launch` spends 10 to 20 s on imports; these jobs start at once.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["largebatch.tools.verify.preload"])

PRELOAD = "LARGEBATCH_PRELOAD"
"""Environment variable with the names of further modules for the server to import, and the paths of those of tasks,
separated by commas."""

# Time for the other processes of a job to end by themselves after one has failed.
SECONDS_TO_FOLLOW = 1


class Outcome(NamedTuple):
    """The outcome of one process: a "result", or an "error" with its reason, and its time."""

    kind: str
    value: Any
    moment: float


class JobFailed(AssertionError):
    """A process of a job raised, exited or did not end in time.

    Args:
        reports: The rank, the traceback or exit code, and the output of each process that failed, in order of failure.
    """

    def __init__(self, reports: Sequence[tuple[int, str, str]]):
        self.reports = list(reports)
        super().__init__("\n".join(f"--- rank {rank}: {reason}\n{output}" for rank, reason, output in reports))


def preload_tasks(folders: Iterable[Path], *modules: str) -> None:
    """Make the server import modules of tasks, and others, once; call this before the first job."""
    of_tasks = (str(folder.absolute() / module) for folder in folders for module in ("data", "model"))
    os.environ[PRELOAD] = ",".join([*of_tasks, *modules])


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """The variables by which processes on this machine find each other.

    As in torch's launcher, the store that they name is hosted here until the context ends, so no process can look for
    it too early and wait before it tries again.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run_job(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
) -> list[Any]:
    """Call `function(*arguments)` in every process of a job and return the results by rank.

    Args:
        function: Function that can be pickled, and so can its results.
        arguments: Arguments that can be pickled.
        world_size: Number of processes; if `environment` has a WORLD_SIZE, they get RANK, LOCAL_RANK and a rendezvous.
        environment: Variables added to the environment of this process.
        folder: Working directory of the processes.
        timeout: Seconds until the first result, and then until each next one.

    Raises:
        JobFailed: A process failed or did not answer in time.
    """
    with tempfile.TemporaryDirectory() as logs, meeting_place() as place:
        outputs = [Path(logs, f"rank{rank}.log") for rank in range(world_size)]
        processes, pipes = [], []
        try:
            for rank, output in enumerate(outputs):
                mine, theirs = _context.Pipe(duplex=False)
                settings = dict(environment)
                if "WORLD_SIZE" in environment:
                    settings |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = _context.Process(target=_work, args=(theirs, output, folder, settings, function, arguments))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            results = _collect(pipes, timeout)
            for process in processes:
                process.join(timeout=10 if len(results) == world_size else 0)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = sorted(
            (outcome.moment, rank, outcome.value) for rank, outcome in results.items() if outcome.kind == "error"
        )
        silent = [rank for rank in range(world_size) if rank not in results]
        reason = f"stopped after rank {failures[0][1]} had failed" if failures else f"no result within {timeout:.0f} s"
        reports = [(rank, str(value)) for _, rank, value in failures] + [(rank, reason) for rank in silent]
        texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
    if reports:
        raise JobFailed([(rank, reason, texts[rank]) for rank, reason in reports])
    return [results[rank].value for rank in range(world_size)]


def _collect(pipes: Sequence[Connection], timeout: float) -> dict[int, Outcome]:
    """The outcomes of the processes that answered in time, by rank."""
    results: dict[int, Outcome] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=timeout)
        if not ready:
            break
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = Outcome("error", "the process ended without a result", time.time())
        if any(outcome.kind == "error" for outcome in results.values()):
            # The others would wait for the one that failed.
            timeout = min(timeout, SECONDS_TO_FOLLOW)
    return results


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(
    pipe: Connection,
    output: Path,
    folder: Path,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ.update(environment)
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            kind, value = "result", function(*arguments)
        except SystemExit as left:
            kind, value = "error" if left.code else "result", f"exit code {left.code}" if left.code else None
        except BaseException:
            kind, value = "error", traceback.format_exc()
        with suppress(BrokenPipeError):
            pipe.send(Outcome(kind, value, time.time()))
        sys.stdout.flush()
        sys.stderr.flush()
    # Skip the interpreter's shutdown: threads of the engines may still wait for processes that failed.
    os._exit(0)
