"""Requests to stop: signals, a file in the run folder, and the end of a SLURM job's time.

They are only noted here. The processes agree once per step, by a reduction that runs while they compute, so that all
of them stop after the same step.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
# Processes agree on the number of a reason in this list: the largest that any of them has; 0 means none.
REASONS = ("", "the stop file", "the end of the job's time limit", *(name.name for name in SIGNALS))
SECONDS_BETWEEN_LOOKS = 1.0


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
