"""Measuring in pairs: contenders in rounds, or side by side, taking turns in who comes first.

What else a machine does changes over seconds and minutes. Contenders that are measured next to each other meet the
same machine, and their ratio does not depend on it; one after the other in two long runs, they do not.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Round = dict[str, float]


def interleave(names: Sequence[str], rounds: int, measure: Callable[[str], float]) -> list[Round]:
    """Measure every contender once a round; each round begins with another one."""
    measured = []
    for number in range(rounds):
        measured.append({name: measure(name) for name in rotated(names, number)})
        print({name: float(f"{measured[-1][name]:.4g}") for name in names}, file=sys.stderr, flush=True)
    return measured


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round: another one comes first in each."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def in_own_process(program: Path, name: str, timeout: float = 600) -> float:
    """What `program --only NAME` prints as its last line, run in a process of its own.

    Raises:
        SystemExit: The program failed.
    """
    command = [sys.executable, str(program), "--only", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    if result.returncode:
        sys.exit(f"{name} failed:\n{result.stderr[-2000:]}")
    return float(json.loads(result.stdout.strip().splitlines()[-1]))


# --- side by side -----------------------------------------------------------------------------------------------------


class TurnClock:
    """In a process of a contender: times the steps of a turn, and sleeps while it is another's turn.

    Args:
        connection: To the program that measures.
        steps: Optimizer steps of a turn.
        warmup: Steps before the first turn.
        synchronise: Waits for the device.
    """

    def __init__(self, connection: Connection, steps: int, warmup: int, synchronise: Callable[[], object] = bool):
        self._connection = connection
        self._steps = steps
        self._synchronise = synchronise
        self._left = warmup
        self._started = time.perf_counter()

    def step(self) -> None:
        """To be called at the end of every optimizer step; ends the process with the last turn."""
        self._left -= 1
        if self._left:
            return
        self._synchronise()
        self._connection.send(self.end_turn())
        wish = self._connection.recv()
        if not wish:
            sys.exit()
        self.begin_turn(wish)
        self._left = self._steps
        self._started = time.perf_counter()

    def begin_turn(self, wish: object) -> None:
        """Prepare for what the next turn is to tell; True are seconds."""

    def end_turn(self) -> object:
        """What the turn tells: seconds per step."""
        return (time.perf_counter() - self._started) / self._steps


@dataclass(frozen=True)
class Contender:
    """A job that has warmed up and waits for its turns.

    Args:
        connections: To its processes.
        job: Its end, or its failure.
    """

    connections: Sequence[Connection]
    job: "Future[Any]"

    def turn(self) -> float:
        """Seconds per step of the slowest process, of one turn."""
        for connection in self.connections:
            connection.send(True)
        return self.answer()

    def ask(self, wish: object) -> Any:
        """What a turn of the first process tells, whose clock knows this wish."""
        self.connections[0].send(wish)
        return self._receive(self.connections[0])

    def answer(self) -> float:
        """Wait for the end of the turn, or of the steps before the first one."""
        return max(float(self._receive(connection)) for connection in self.connections)

    def _receive(self, connection: Connection) -> Any:
        while not connection.poll(0.2):
            if self.job.done():
                # Raises what the job has failed with.
                self.job.result()
                raise RuntimeError("a contender ended before its turns were over")
        return connection.recv()


@contextmanager
def contender(start: Callable[[Sequence[Connection]], Any], world_size: int) -> Iterator[Contender]:
    """Start a job, and wait until it has warmed up.

    Args:
        start: Runs the job to its end; gets a connection for the `TurnClock` of each of its processes.
        world_size: Processes.
    """
    pipes = [Pipe() for _ in range(world_size)]
    with ThreadPoolExecutor(1) as executor:
        job = executor.submit(start, [theirs for _, theirs in pipes])
        started = Contender([mine for mine, _ in pipes], job)
        started.answer()
        try:
            yield started
        finally:
            for mine, _ in pipes:
                mine.send(False)


def take_turns(contenders: Mapping[str, Contender], rounds: int) -> list[Round]:
    """Rounds of one turn each."""
    return interleave(list(contenders), rounds, lambda name: contenders[name].turn())


def start_job(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Sequence[Connection]], Any]:
    """A job of forked processes that call `function(connections, *arguments)`, for `contender`.

    Args:
        function: Found by its name in its module; takes the connection of its own rank.
        arguments: Arguments that can be pickled.
        options: Options of `largebatch.tools.local_jobs.jobs.run_job`.
    """
    from largebatch.tools.local_jobs.jobs import run_job

    def start(connections: Sequence[Connection]) -> Any:
        return run_job(function, connections, *arguments, **options)

    return start
