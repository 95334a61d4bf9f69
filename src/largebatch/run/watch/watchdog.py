"""The watchdog: a process that hangs, or waits for one that does, writes its stacks and ends the job."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

EXIT_CODE = 70
SECONDS_FOR_REPORTS = 5.0  # which all processes write when they have noticed, besides the time until all have


class Watchdog:
    """Ends the process when `heartbeat` has not been called for too long.

    A Python thread checks. If it cannot run, because a library holds the interpreter, a C thread of `faulthandler`,
    which it postpones each time, writes the stacks and ends the process.

    Args:
        seconds: How long is too long; None for no limit.
        stack_file: Where to write the stacks of all threads; None means standard error.
        explain: Says for whom the process waits, and takes at most so many seconds.
        on_hang: Called with a message before the process ends.
    """

    def __init__(
        self,
        seconds: float | None,
        stack_file: Path | None,
        explain: Callable[[float], str],
        on_hang: Callable[[str], None],
    ):
        self._seconds, self._stack_file, self._explain, self._on_hang = seconds, stack_file, explain, on_hang
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
        if self._stack_file is not None and self._stack_file.stat().st_size == 0:
            self._stack_file.unlink()
            with suppress(OSError):
                # Fails if another process has written stacks, or is still running.
                self._stack_file.parent.rmdir()
                self._stack_file.parent.parent.rmdir()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _open_stack_file(self) -> IO[str]:
        if self._stack_file is None:
            return os.fdopen(2, "w", closefd=False)
        while True:
            # Another process of this job may stop watching, and remove the empty folder, in between.
            with suppress(FileNotFoundError):
                self._stack_file.parent.mkdir(parents=True, exist_ok=True)
                return self._stack_file.open("w", encoding="utf-8")

    def _watch(self, seconds: float, stacks: IO[str]) -> None:
        interval = min(seconds / 4, 10.0)
        # The others look at their own clocks once per interval.
        patience = interval + SECONDS_FOR_REPORTS
        while True:
            # After the others have reported: a process that ends breaks their connections, so that they fail.
            faulthandler.dump_traceback_later(seconds + 3 * interval + patience, exit=True, file=stacks)
            if self._over.wait(interval):
                return
            silent = time.monotonic() - self._last_heartbeat
            if silent >= seconds:
                faulthandler.dump_traceback(file=stacks, all_threads=True)
                stacks.flush()
                try:
                    reason = self._explain(patience)
                except Exception as error:
                    # The job must end all the same.
                    reason = f"for whom it waits is not known: {type(error).__name__}: {error}"
                where = f"in {self._stack_file.parent}" if self._stack_file else "in the job's log"
                self._on_hang(
                    f"no progress for {silent:.0f} s, more than faults.hang_seconds {seconds:g}: {reason}; the stack "
                    f"of each process that could write one is {where}"
                )
                os._exit(EXIT_CODE)
