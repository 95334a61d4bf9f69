"""Requests to stop: signals, a file in the run folder, and the end of a SLURM job's time.

They are only noted here. In each step the processes begin a reduction, over the host, whose result they read a fixed
number of steps later, so that all of them stop after the same step, and none waits for it.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from largebatch.plan.contract import STEPS_OF_A_VOTE

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
# Processes agree on the number of a reason in this list: the largest that any of them has; 0 means none.
REASONS = ("", "the stop file", "the end of the job's time limit", *(name.name for name in SIGNALS))
SECONDS_BETWEEN_LOOKS = 1.0


class Agreement:
    """The reason to stop that all processes agree on, as they read it in each step.

    Args:
        largest: Begins to find the largest of all processes' numbers, and returns a function that waits for it.
    """

    def __init__(self, largest: Callable[[int], Callable[[], int]]):
        self._largest = largest
        self._votes: deque[Callable[[], int]] = deque()

    def vote(self, reason: int) -> None:
        """Begin the vote of a step, with this process's reason by its number in `REASONS`."""
        self._votes.append(self._largest(reason))

    def reason(self) -> int:
        """The largest number in the vote of `STEPS_OF_A_VOTE` steps ago; call it once in each step."""
        return self._votes.popleft()() if len(self._votes) > STEPS_OF_A_VOTE else 0

    def close(self) -> None:
        """Wait for all votes: one that is under way when a process leaves would fail on the others."""
        while self._votes:
            self._votes.popleft()()


class StopRequests:
    """Whether this process was asked to stop.

    Args:
        stop_file: The run's stop file; None if another process watches it.
        margin_seconds: How long before the end of the SLURM job's time limit to stop.
        environment: Variables, with SLURM_JOB_END_TIME in seconds since 1970 if there is a limit.
        clock: Returns seconds since 1970.
    """

    def __init__(
        self,
        stop_file: Path | None,
        margin_seconds: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ):
        self._stop_file = stop_file
        self._clock = clock
        end = environment.get("SLURM_JOB_END_TIME", "")
        self._stop_at = float(end) - margin_seconds if end.isdigit() else None
        self._reason = 0
        self._looked = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals instead of exiting on them."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._reason = max(self._reason, REASONS.index(signal.Signals(number).name))

    def requested(self) -> int:
        """The number of the reason to stop, or 0; looks at the stop file at most once a second."""
        now = self._clock()
        # The clock may be set back.
        if self._stop_file is not None and abs(now - self._looked) >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if self._stop_file.exists():
                self._reason = max(self._reason, REASONS.index("the stop file"))
        if self._stop_at is not None and now >= self._stop_at:
            self._reason = max(self._reason, REASONS.index("the end of the job's time limit"))
        return self._reason
