"""Traces of a run's steps by torch's profiler: what the host and the device of this process did, and when."""

import secrets
import sys
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from torch.profiler import profile, record_function

from largebatch.config.sections import ProfiledSteps
from largebatch.run.feed import StepFeed


def traced(
    feed: Iterator[StepFeed], completed: int, window: ProfiledSteps | None, file: Path
) -> Generator[StepFeed, None, None]:
    """The work of the run's steps after `completed` ones, while those of the window are traced.

    "step N" in the trace spans everything from asking for its work to asking for the next step's: loading, its passes
    and update, and the evaluation or checkpoint after it. The file is gzipped Chrome JSON, written when the window or
    the generator ends; if it cannot be written, the run warns and continues.
    """
    if window is None or window.last_step <= completed:
        yield from feed
        return
    first = max(window.first_step, completed + 1)
    yield from islice(feed, first - 1 - completed)
    with profile(on_trace_ready=partial(_write, file)):
        for step in range(first, window.last_step + 1):
            with record_function(f"step {step}"):
                yield next(feed)
    yield from feed


def _write(file: Path, profiler: profile) -> None:
    unfinished = file.with_name(f".{secrets.token_hex(8)}.{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
    except (OSError, RuntimeError) as error:
        print(f"WARNING: the trace {file} cannot be written: {error}", file=sys.stderr, flush=True)
