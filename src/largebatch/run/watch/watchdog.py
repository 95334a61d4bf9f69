"""The watchdog: a process that hangs, or waits for one that does, writes down what it was doing, and ends the job."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from largebatch.backend.torch_internals import recorded_collectives

EXIT_CODE = 70
STANDARD_ERROR = 2  # the file descriptor, whatever has taken the place of `sys.stderr`
SECONDS_FOR_OTHERS = 10.0  # in which the other processes, too, notice the hang and write their stacks


@dataclass
class Watchdog:
    """Ends the process when `heartbeat` has not been called for too long in a `with` block.

    A Python thread checks. If it cannot run, because a library holds the interpreter, a C thread of `faulthandler`,
    which it postpones each time, writes the stacks to standard error and ends the process.
    """

    seconds: float | None  # how long is too long; None for no limit
    rank: int  # this process's rank
    report: Callable[[str], None]  # called with a message when the process is about to be ended
    # Where each process writes its stacks and its NCCL collectives; None writes the stacks to standard error.
    folder: Path | None = None
    _last_heartbeat: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def heartbeat(self) -> None:
        """Signal progress."""
        self._last_heartbeat = time.monotonic()

    def __enter__(self) -> None:
        if self.seconds is not None:
            self.heartbeat()
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, args=(self.seconds,), name="watchdog", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, seconds: float) -> None:
        interval = min(seconds / 4, 10.0)
        while True:
            patience = seconds + 4 * interval + SECONDS_FOR_OTHERS
            faulthandler.dump_traceback_later(patience, exit=True, file=STANDARD_ERROR)
            if self._over.wait(interval):
                return
            silent = time.monotonic() - self._last_heartbeat
            if silent >= seconds:
                self._end(f"no progress for {silent:.0f} s, more than faults.hang_seconds {seconds:g}", interval)

    def _end(self, what: str, interval: float) -> None:
        """Record the hang, and end the process when the others have had time to notice and do the same."""
        self.report(f"{what}; {self._write_stacks()}")
        if self.folder is not None:
            # The job must still end.
            with suppress(Exception):
                (self.folder / f"fr_{self.rank}").write_bytes(recorded_collectives())
        # A process that ends breaks the connections of the others, which fail with an error then.
        time.sleep(interval + SECONDS_FOR_OTHERS)
        os._exit(EXIT_CODE)

    def _write_stacks(self) -> str:
        """Write the stacks of all threads, and return where those of all processes are, in words."""
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / f"rank_{self.rank:05d}.txt").open("w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file)
                return (
                    "the stacks of the processes (rank_*.txt) and, with NCCL, their collectives (fr_*, for "
                    f"`torchfrtrace`) are in {self.folder}"
                )
        faulthandler.dump_traceback(STANDARD_ERROR)
        return "the stacks of the processes are in the job's log"
