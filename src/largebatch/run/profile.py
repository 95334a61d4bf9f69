"""A trace of some steps, by torch's profiler: what the host and the device of this process did when."""

import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from largebatch.config.sections import ProfiledSteps
from largebatch.run.feed import StepFeed


@contextmanager
def profiled(
    feed: Iterable[StepFeed], first_step: int, window: ProfiledSteps | None, file: Path
) -> Iterator[Iterable[StepFeed]]:
    """Trace the steps of a window while a loop goes through the work of the run's steps.

    A step's part of the trace, "step N", is all that happens from asking for its work to asking for the next step's:
    loading, its passes and update, and the evaluation or checkpoint behind it. Where the loop is left before the end of
    the window, the trace has the steps until then.

    Args:
        feed: The work of the steps.
        first_step: Steps that earlier attempts have made.
        window: Which steps to trace; None is none.
        file: Where to write the trace, as Chrome's JSON in gzip. A failure is told, and does not end the run.
    """
    if window is None or window.last_step <= first_step:
        yield feed
        return
    tracing = _tracing(iter(feed), first_step, window, file)
    try:
        yield tracing
    finally:
        tracing.close()


def _tracing(
    feed: Iterator[StepFeed], completed: int, window: ProfiledSteps, file: Path
) -> Generator[StepFeed, None, None]:
    for _ in range(window.first_step - 1 - completed):
        yield next(feed)
        completed += 1
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    profiler.start()
    try:
        while completed < window.last_step:
            completed += 1
            with record_function(f"step {completed}"):
                yield next(feed)
    finally:
        profiler.stop()
        _write(profiler, file)
    yield from feed


def _write(profiler: profile, file: Path) -> None:
    unfinished = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
    except (OSError, RuntimeError) as error:
        print(f"WARNING: the trace {file} cannot be written: {error}", file=sys.stderr, flush=True)
