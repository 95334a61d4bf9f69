"""Traces of a run's steps by torch's profiler, and a table of where the time of each step went."""

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, profile, record_function

from largebatch.config.sections import ProfiledSteps
from largebatch.run.feed import StepFeed
from largebatch.run.record.metrics import DATA_WAIT, PAUSED, StepMetrics, peak_memory
from largebatch.storage.files import replace_file

STEP, COMPUTE, COMMUNICATION = "step ", "compute", "exposed_communication"


def traced(
    feed: Iterator[StepFeed], completed: int, window: ProfiledSteps | None, metrics: StepMetrics, file: Path
) -> Generator[StepFeed, None, None]:
    """The work of the run's steps after `completed` ones, while those of the window are traced.

    "step N" in the trace spans everything from asking for its work to asking for the next step's: loading, its passes
    and update, and the evaluation or checkpoint after it. The file is gzipped Chrome JSON, and the one beside it, which
    ends in .jsonl, has the table. They are written when the window or the generator ends; if they cannot be written,
    the run warns and continues.
    """
    if window is not None and window.last_step > completed:
        first = max(window.first_step, completed + 1)
        yield from islice(feed, first - 1 - completed)
        # So that what the device does in a step is the step's work, and all of it.
        wait_for_device = torch.get_device_module(metrics.device).synchronize
        wait_for_device()
        with profile(on_trace_ready=lambda profiler: _write(metrics, file, profiler)):
            for step in range(first, window.last_step + 1):
                with record_function(f"{STEP}{step}"):
                    yield next(feed)
                    wait_for_device()
    yield from feed


def _write(metrics: StepMetrics, file: Path, profiler: profile) -> None:
    # Before the trace itself, which may be large, takes memory.
    peak = {"peak_memory_gib": peak_memory(metrics.device)}
    unfinished = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
        rows = time_of_steps(profiler.events(), metrics.device.type == "cuda")  # type: ignore[no-untyped-call]
        lines = [json.dumps(row | {"mfu": metrics.mfu(row["step"], row["seconds"])} | peak) + "\n" for row in rows]
        replace_file(file.with_suffix("").with_suffix(".jsonl"), [memoryview("".join(lines).encode())])
    except (OSError, RuntimeError) as error:
        print(f"WARNING: the trace {file} cannot be written: {error}", file=sys.stderr, flush=True)


def time_of_steps(events: Sequence[FunctionEvent], on_gpu: bool) -> list[dict[str, Any]]:
    """Where the seconds of each step went; evaluations and checkpoints are left out.

    What happens at the same time counts once. While a GPU computes, communication and the wait for data are hidden; on
    a CPU, what computes while the next samples are asked for makes samples.

    Args:
        events: What the profiler has recorded.
        on_gpu: Whether "compute" is the time in a GPU's kernels, or in torch's operations on the CPU.
    """
    columns = (COMPUTE, COMMUNICATION, DATA_WAIT) if on_gpu else (DATA_WAIT, COMPUTE, COMMUNICATION)
    kinds = np.array([_kind(event, on_gpu) for event in events], dtype=object)
    spans = np.array([(event.time_range.start, event.time_range.end) for event in events])
    edges = np.unique(spans)

    def during(kind: str) -> NDArray[np.bool_]:
        """Between each two neighboring edges, whether something of this kind goes on."""
        begins, ends = np.searchsorted(edges, spans[kinds == kind]).T
        changes = np.bincount(begins, minlength=len(edges)) - np.bincount(ends, minlength=len(edges))
        return changes.cumsum()[:-1] > 0

    rows = []
    for name in dict.fromkeys(kind for kind in kinds.tolist() if kind.removeprefix(STEP).isdigit()):
        left = np.diff(edges) / 1e6 * (during(name) & ~during(PAUSED))
        row = {"step": int(name.removeprefix(STEP)), "seconds": round(left.sum(), 6)}
        for column in columns:
            row[column] = round(left[during(column)].sum(), 6)
            left *= ~during(column)
        rows.append(row | {"host": round(left.sum(), 6)})
    return rows


def _kind(event: FunctionEvent, on_gpu: bool) -> str:
    """The column that an event counts in, or its name."""
    name: str = event.name
    if event.device_type != DeviceType.CPU:
        # Ranges that code names are on the GPU's timeline, too, and so are copies between host and GPU.
        is_kernel = not event.is_user_annotation and not name.startswith("Mem")
        return (COMMUNICATION if "nccl" in name else COMPUTE) if is_kernel else ""
    if name.startswith("gloo:"):
        return COMMUNICATION
    return COMPUTE if name.startswith("aten::") and not on_gpu else name
