"""The watchdog: a process that hangs, or waits for one that does, writes down what it was doing, and ends the job."""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from largebatch.backend.torch_internals import recorded_collectives
from largebatch.failures import keep_error
from largebatch.run.record.record import report_failure

EXIT_CODE = 70
SECONDS_FOR_OTHERS = 10.0  # in which the other processes, too, notice the hang and write their stacks


class Watchdog:
    """Ends the process when `heartbeat` has not been called for too long.

    A Python thread checks. If it cannot run, because a library holds the interpreter, a C thread of `faulthandler`,
    which it postpones each time, writes the stacks and ends the process.

    Args:
        seconds: How long is too long; None for no limit.
        rank: This process's rank.
        folder: Where each process writes its stacks and its NCCL collectives; None writes the stacks to standard error.
    """

    def __init__(self, seconds: float | None, rank: int, folder: Path | None = None):
        self._seconds, self._rank, self._folder = seconds, rank, folder
        self._last_heartbeat = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: IO[str] | None = None

    def heartbeat(self) -> None:
        """Signal progress."""
        self._last_heartbeat = time.monotonic()

    def start(self) -> None:
        """Watch until `stop`."""
        if self._seconds is None:
            return
        self._stacks = self._open_stack_file()
        self.heartbeat()
        self._over.clear()
        self._thread = threading.Thread(
            target=self._watch, args=(self._seconds, self._stacks), name="watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; an empty stack file is deleted."""
        if self._thread is None or self._stacks is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        if self._folder is not None and self._stack_file(self._folder).stat().st_size == 0:
            self._stack_file(self._folder).unlink()
            with suppress(OSError):
                # Fails if another process has written stacks, or is still running.
                self._folder.rmdir()
                self._folder.parent.rmdir()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _stack_file(self, folder: Path) -> Path:
        return folder / f"rank_{self._rank:05d}.txt"

    def _open_stack_file(self) -> IO[str]:
        if self._folder is None:
            return os.fdopen(2, "w", closefd=False)
        while True:
            # Another process of this job may stop watching, and remove the empty folder, in between.
            with suppress(FileNotFoundError):
                self._folder.mkdir(parents=True, exist_ok=True)
                return self._stack_file(self._folder).open("w", encoding="utf-8")

    def _watch(self, seconds: float, stacks: IO[str]) -> None:
        interval = min(seconds / 4, 10.0)
        while True:
            faulthandler.dump_traceback_later(seconds + 4 * interval + SECONDS_FOR_OTHERS, exit=True, file=stacks)
            if self._over.wait(interval):
                return
            silent = time.monotonic() - self._last_heartbeat
            if silent >= seconds:
                faulthandler.dump_traceback(file=stacks, all_threads=True)
                self._end(f"no progress for {silent:.0f} s, more than faults.hang_seconds {seconds:g}", interval)

    def _end(self, what: str, interval: float) -> None:
        """Record the hang, and end the process when the others have had time to notice and do the same."""
        where = "the stacks of the processes are in the job's log"
        if self._folder is not None:
            where = (
                "the stacks of the processes (rank_*.txt) and, with NCCL, their collectives (fr_*, for `torchfrtrace`) "
                f"are in {self._folder}"
            )
        report_failure(f"{what}; {where}", kind="hang")
        keep_error(f"{what}; {where}", kind="hang")
        if self._folder is not None:
            # The job must end all the same.
            with suppress(Exception):
                (self._folder / f"fr_{self._rank}").write_bytes(recorded_collectives())
        # A process that ends breaks the connections of the others, which fail with an error then.
        time.sleep(interval + SECONDS_FOR_OTHERS)
        os._exit(EXIT_CODE)
