"""Requests to stop: signals, files in the run folder, and the end of a job's time.

They are only noted here. In each step the processes begin a reduction, over the host, whose result they read a fixed
number of steps later, so that all of them stop after the same step, and none waits for it.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.plan.contract import STOP_VOTE_STEPS
from largebatch.system.endings import STOP_SIGNALS, StopReason
from largebatch.system.variables import whole_number

REASONS: tuple[StopReason | None, ...] = (None, *StopReason)
"""Processes agree on the number of a reason in this list: the largest that any of them has; 0 means none."""
SECONDS_BETWEEN_LOOKS = 1.0


class StopRequests:
    """Whether this process was asked to stop, and the processes' vote on it in each step.

    Args:
        stop_files: Files whose creation is a request, by reason; empty if another process watches them.
        all_max: `all_max(number)` starts an all-reduce of the maximum and returns a function that waits for its result.
        margin_seconds: How long before the end of the job's time limit to stop. It is in LARGEBATCH_JOB_END_TIME, in
            seconds since 1970, if there is one.
    """

    def __init__(
        self,
        stop_files: Mapping[StopReason, Path],
        all_max: Callable[[int], Callable[[], int]],
        margin_seconds: float,
    ):
        self._stop_files = stop_files
        self._all_max = all_max
        end = whole_number("LARGEBATCH_JOB_END_TIME", 0)
        self._stop_at = end - margin_seconds if end else math.inf
        self._reason = 0
        self._looked = -math.inf
        self._handlers: dict[signal.Signals, Any] = {}
        self._votes: deque[Callable[[], int]] = deque()

    def listen(self) -> None:
        """Note signals instead of exiting on them, until `close`."""
        for number in STOP_SIGNALS:
            reason = StopReason[number.name]
            self._handlers[number] = signal.signal(number, lambda *_, reason=reason: self._ask(reason))

    def close(self) -> None:
        """Handle signals as before `listen`."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _ask(self, reason: StopReason) -> None:
        self._reason = max(self._reason, REASONS.index(reason))

    def requested(self) -> int:
        """The number of the reason to stop, or 0; looks for stop files at most once a second."""
        now = time.time()
        # The clock may be set back.
        if abs(now - self._looked) >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            for reason, file in self._stop_files.items():
                # No file is seen while the file system fails. Next time it may answer again.
                with suppress(OSError):
                    if file.is_file():
                        self._ask(reason)
        if now >= self._stop_at:
            self._ask(StopReason.TIME_LIMIT)
        return self._reason

    def vote(self) -> None:
        """Cast this process's vote in a step."""
        self._votes.append(self._all_max(self.requested()))

    def result(self) -> StopReason | None:
        """The reason that won the vote of `STOP_VOTE_STEPS` steps ago; call it once in each step."""
        if len(self._votes) <= STOP_VOTE_STEPS:
            return None
        return REASONS[self._votes.popleft()()]

    def end_votes(self) -> None:
        """Wait for all votes: one that is under way when a process leaves would fail on the others."""
        while self._votes:
            self._votes.popleft()()
