"""Jobs of several processes, forked from a server that has imported the engines already.

A fresh `accelerate launch` takes 10 to 20 s of imports; these start at once.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["largebatch.rehearsal.preload"])

# For the other processes of a job to end by themselves once one has failed, in seconds.
SECONDS_TO_FOLLOW = 1


class JobFailed(AssertionError):
    """A process of a job raised, exited or did not end in time.

    Args:
        reports: Of each process that failed: its rank, its traceback or exit code, and its output.
    """

    def __init__(self, reports: Sequence[tuple[int, str, str]]):
        self.reports = list(reports)
        super().__init__("\n".join(f"--- rank {rank}: {reason}\n{output}" for rank, reason, output in reports))


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
        function: Found by its name in its module, and given back by it what can be pickled.
        arguments: What can be pickled.
        world_size: Processes; they get RANK and LOCAL_RANK where `environment` has a WORLD_SIZE.
        environment: Added to this process's environment.
        folder: Working directory of the processes.
        timeout: Seconds until the first result; the others must follow as quickly.

    Raises:
        JobFailed: With the output and the traceback of the processes that failed.
    """
    with tempfile.TemporaryDirectory() as logs:
        outputs = [Path(logs, f"rank{rank}.log") for rank in range(world_size)]
        processes, pipes = [], []
        try:
            for rank, output in enumerate(outputs):
                mine, theirs = _context.Pipe(duplex=False)
                settings = dict(environment)
                if "WORLD_SIZE" in environment:
                    settings |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
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
        reports = []
        for rank, output in enumerate(outputs):
            kind, value = results.get(rank, ("error", f"no result within {timeout:.0f} s"))
            if kind == "error":
                reports.append((rank, str(value), output.read_text(errors="replace") if output.exists() else ""))
    if reports:
        raise JobFailed(reports)
    return [results[rank][1] for rank in range(world_size)]


def _collect(pipes: Sequence[Connection], timeout: float) -> dict[int, tuple[str, Any]]:
    """("result", value) or ("error", reason) of each process that answered in time, by rank."""
    results: dict[int, tuple[str, Any]] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=timeout)
        if not ready:
            break
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = ("error", "the process ended without a result")
        if any(kind == "error" for kind, _ in results.values()):
            # The others would wait for the one that failed.
            timeout = min(timeout, SECONDS_TO_FOLLOW)
    return results


def _end_with_the_parent() -> None:
    """A job whose owner was killed must not train on."""
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
            result = ("result", function(*arguments))
        except SystemExit as left:
            result = ("error", f"exit code {left.code}")
        except BaseException:
            result = ("error", traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            pipe.send(result)
        sys.stdout.flush()
        sys.stderr.flush()
    # Not through interpreter shutdown: threads of the engines may still wait for processes that failed.
    os._exit(0)
