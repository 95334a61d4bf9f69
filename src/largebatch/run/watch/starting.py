"""The start of a run: everything before its first step is watched, and ends on request, as its steps do."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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


@dataclass
class Starting:
    """Watches a start until `end`."""

    backend: Backend  # the started backend
    stop: StopRequests  # notes requests to stop
    ending: OwnEnding  # that of this process

    def __post_init__(self) -> None:
        hang_seconds = self.backend.plan.faults.hang_seconds
        seconds = None if hang_seconds is None else max(hang_seconds, START_TIMEOUT_SECONDS)
        self._watchdog = Watchdog(seconds, self.backend.rank, self.ending.hang)
        self._watched = ExitStack()
        self._watched.enter_context(self._watchdog)

    def end(self) -> None:
        """Stop watching: the loop has a watchdog of its own."""
        self._watched.close()

    def check(self) -> None:
        """Raise RunStopped on all processes if one of them was asked to stop; every process must call this."""
        self._watchdog.heartbeat()
        reason = REASONS[self.backend.all_max(self.stop.requested())()]
        if reason is not None:
            message = f"by {reason}, before the first step"
            if reason == StopReason.TIME_LIMIT:
                message += "; prepare the data before, or give more time than faults.time_limit_margin_seconds"
            if self.backend.is_main_process:
                with suppress(OSError):
                    self.ending.write(Kind.STOPPED, message, reason=reason)
            raise RunStopped(f"{message}; the same command starts again", reason == StopReason.STOP_FILE)

    def once_per_machine_first(self, function: Callable[[], T]) -> T:
        """The result of `function`, which the first process of the job calls before the first of each machine, and
        these before all others.

        It may take hours: it runs in a thread, so that all processes notice meanwhile if one was asked to stop.

        Raises:
            RunStopped: A process was asked to stop. The thread continues until its process ends.
        """
        result: Future[T] | None = None
        for turn in (self.backend.is_main_process, self.backend.is_local_main_process, True):
            with self.backend.raise_on_all_ranks():
                if turn and result is None:
                    result = in_thread("preparation", function)
                wait_together(self.backend, self.check, result)
                if result is not None:
                    result.result()
        assert result is not None
        return result.result()
