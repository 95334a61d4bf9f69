"""The start of a run: everything before its first step is watched, and ends on request, as its steps do."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TypeVar

from largebatch.backend.base import Backend
from largebatch.errors import RunStopped
from largebatch.run.watch.stop import REASONS, StopRequests
from largebatch.run.watch.waiting import in_thread, wait_together
from largebatch.run.watch.watchdog import Watchdog
from largebatch.system.endings import OwnEnding, StopReason
from largebatch.system.failures import Kind

T = TypeVar("T")

START_TIMEOUT_SECONDS = 1800.0  # between two signs of progress, even if `faults.hang_seconds` is less


class Starting:
    """Watches a start until `end`.

    Args:
        backend: The started backend.
        stop: Notes requests to stop.
        ending: That of this process.
    """

    def __init__(self, backend: Backend, stop: StopRequests, ending: OwnEnding):
        self._backend = backend
        self._stop = stop
        self._ending = ending
        hang_seconds = backend.plan.faults.hang_seconds
        seconds = None if hang_seconds is None else max(hang_seconds, START_TIMEOUT_SECONDS)
        self._watchdog = Watchdog(seconds, backend.rank, ending.hang)
        self._watched = ExitStack()
        self._watched.enter_context(self._watchdog)

    def end(self) -> None:
        """Stop watching: the loop has a watchdog of its own."""
        self._watched.close()

    def check(self) -> None:
        """Raise RunStopped on all processes if one of them was asked to stop; every process must call this."""
        self._watchdog.heartbeat()
        reason = REASONS[self._backend.all_max(self._stop.requested())()]
        if reason is not None:
            message = f"by {reason}, before the first step"
            if self._backend.is_main_process:
                with suppress(OSError):
                    self._ending.write(Kind.STOPPED, message, reason=reason)
            by_a_person = reason == StopReason.STOP_FILE
            raise RunStopped(f"{message}; the same command starts again", everywhere=True, by_a_person=by_a_person)

    def once_per_machine_first(self, function: Callable[[], T]) -> T:
        """The result of `function`, which the first process of the job calls before the first of each machine, and
        these before all others.

        It may take hours: it runs in a thread, so that all processes notice meanwhile if one was asked to stop.

        Raises:
            RunStopped: A process was asked to stop. The thread continues until its process ends.
        """
        result: Future[T] | None = None
        for turn in (self._backend.is_main_process, self._backend.is_local_main_process, True):
            with self._backend.raise_on_all_ranks():
                if turn and result is None:
                    result = in_thread("preparation", function)
                wait_together(self._backend, self.check, result)
                if result is not None:
                    result.result()
        assert result is not None
        return result.result()
