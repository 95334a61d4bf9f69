"""Traces of a run's steps by torch's profiler, and its table of the operations that took the most time."""

import sys
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from largebatch.config.sections import ProfiledSteps
from largebatch.run.feed import StepFeed
from largebatch.storage.files import replace_file


def traced(
    feed: Iterator[StepFeed], completed: int, window: ProfiledSteps | None, device: torch.device, file: Path
) -> Generator[StepFeed, None, None]:
    """The work of the run's steps after `completed` ones, while those of the window are traced.

    "step N" in the trace spans everything from asking for its work to asking for the next step's: loading, its passes
    and update, and the evaluation or checkpoint after it. The file is gzipped Chrome JSON, and the one beside it, which
    ends in .txt, has the table. They are written when the window or the generator ends; if they cannot be written, the
    run warns and continues.
    """
    if window is not None and window.last_step > completed:
        first = max(window.first_step, completed + 1)
        yield from islice(feed, first - 1 - completed)
        # So that what the device does in a step is the step's work, and all of it.
        wait_for_device = torch.get_device_module(device).synchronize
        wait_for_device()
        with profile(on_trace_ready=partial(_write, file, device)):
            for step in range(first, window.last_step + 1):
                with record_function(f"step {step}"):
                    yield next(feed)
                    wait_for_device()
    yield from feed


def _write(file: Path, device: torch.device, profiler: profile) -> None:
    unfinished = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
        operations = profiler.key_averages()
        table = operations.table(sort_by=f"self_{device.type}_time_total", row_limit=-1)
        replace_file(file.with_suffix("").with_suffix(".txt"), [memoryview(table.encode())])
    except (OSError, RuntimeError) as error:
        print(f"WARNING: the trace {file} cannot be written: {error}", file=sys.stderr, flush=True)
