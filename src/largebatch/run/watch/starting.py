"""The start of a run: everything before its first step is watched, and ends on request, as its steps do."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from largebatch.backend.base import Backend
from largebatch.data.preparation import preparation
from largebatch.errors import RunStopped, UserError
from largebatch.run.watch.hang import report_hang
from largebatch.run.watch.stop import StopRequests, reason_in_words
from largebatch.run.watch.watchdog import Watchdog

T = TypeVar("T")

SECONDS_OF_A_START = 1800.0  # between two signs of progress, even if `faults.hang_seconds` is less
SECONDS_BETWEEN_ROUNDS = 1.0


class Starting:
    """Watches a start from now on.

    Args:
        backend: The started backend.
        stop: Notes requests to stop.
        hang_seconds: As `faults.hang_seconds`.
        command: The command that prepares the recipe's data.
    """

    def __init__(self, backend: Backend, stop: StopRequests, hang_seconds: float | None, command: str):
        self._backend, self._stop, self._command = backend, stop, command
        seconds = None if hang_seconds is None else max(hang_seconds, SECONDS_OF_A_START)
        self._watchdog = Watchdog(seconds, None, lambda _: "the run was starting", report_hang)
        self._watch, self._listen = ExitStack(), ExitStack()
        self._watch.enter_context(self._watchdog.watching())
        self._listen.enter_context(stop.listening())
        self._last_round = 0.0

    def steps_begin(self) -> None:
        """Leave the watching to the steps."""
        self._watch.close()

    def end(self) -> None:
        """No longer note requests."""
        self._listen.close()

    def check(self) -> None:
        """Raise RunStopped on all processes if one of them was asked to stop; every process must call this."""
        self._watchdog.heartbeat()
        reason = self._backend.largest_of_processes(self._stop.requested())()
        if reason:
            message = f"by {reason_in_words(reason)}, before the first step; the same command starts again"
            raise RunStopped(message, everywhere=True)

    def once_per_machine_first(self, function: Callable[[], T]) -> T:
        """The result of `function`, which the first process of the job calls before the first of each machine, and
        these before all others, while those that wait see that it makes progress.

        Raises:
            RunStopped: A process was asked to stop.
        """
        results: list[T] = []
        how = replace(preparation.get(), command=self._command, progress=self._progress, needed={})
        for turn in (self._backend.is_main_process, self._backend.is_local_main_process, True):
            with self._backend.raise_on_all_ranks():
                failure = None
                if turn and not results:
                    token = preparation.set(how)
                    try:
                        results.append(function())
                    except RunStopped:
                        raise
                    except UserError as error:
                        failure = error
                    finally:
                        preparation.reset(token)
                while self._some_work(False):
                    pass
                if failure is not None:
                    raise failure
        return results[0]

    def _progress(self) -> None:
        if time.monotonic() - self._last_round >= SECONDS_BETWEEN_ROUNDS:
            self._some_work(True)

    def _some_work(self, this_one: bool) -> bool:
        """Whether some process still works; one that does calls this now and then, and the others all the time."""
        some = self._backend.largest_of_processes(int(this_one))()
        self.check()
        self._last_round = time.monotonic()
        return bool(some)
