"""Traces of a run's steps by torch's profiler: what the host and the device of this process did, and when."""

import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

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
        unfinished = file.with_name(f".{file.name}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(file)
        except (OSError, RuntimeError) as error:
            print(f"WARNING: the trace {file} cannot be written: {error}", file=sys.stderr, flush=True)
    yield from feed
