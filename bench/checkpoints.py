"""What checkpoints cost on CPU, beside `torch.distributed.checkpoint`: saving, loading, stalling, memory.

    .venv/bin/python bench/checkpoints.py

Everything that is compared is paired and interleaved in one job, whose rounds take turns in who comes first. Takes some
three minutes on two quiet cores. Dropping the page cache needs root; without it those cases are not measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_job import (
    ASYNCHRONOUS,
    DROP_CACHES,
    MEMORY_CASES,
    MIB,
    SYNCHRONOUS,
    TORCH,
    WITH_STATE_DICTS,
    WORLD_SIZE,
    measure_loads,
    measure_memory,
    measure_saves,
    measure_stalls,
    prepare_memory,
)
from largebatch.tools.local_jobs.jobs import run_job
from launches import job_options
from record import OURS, Comparison, Figure, Record, add_output_options, take_facts, write_record

# Ratios aimed at.
OF_TORCH = 1.10
HELD_UP = 0.20

ABOUT = """Two processes hold a model under DDP with AdamW's states, in this library's backend.

- **Loads** of ours include finding the latest checkpoint and verifying its checksums. Torch creates an optimizer's
  states in `get_state_dict`, ours in the load; where states are created, the target compares ours with both together.
- **Held up** by an asynchronous save is the time in `save` plus the time that the next update waits for the copy of the
  state, which is made while the next step's gradients are computed. Two processes on two cores have no core to spare
  for it, so the step itself is slower.
- **Memory** is the peak beyond the state itself, in the process that needs more. The target allows half the state,
  which is what a process writes, and the largest parameter. It is VmHWM, which includes pages of mapped files that the
  system can take back.
- The virtual disk may have a cache of its own, and single rounds vary widely.
"""


class Measuring:
    """Runs functions of `checkpoint_job` in jobs."""

    def __init__(self, settings: argparse.Namespace):
        self._settings = settings

    def job(self, function: Callable[..., Any], folder: str, *arguments: Any) -> list[Any]:
        """The results by rank."""
        print(function.__name__, *arguments, file=sys.stderr, flush=True)
        return run_job(function, self._settings, Path(folder), *arguments, **job_options("ddp", WORLD_SIZE, 1800))

    def alone(self, function: Callable[..., Any]) -> Any:
        """The first process's result, in a folder of its own."""
        with self.folder() as folder:
            return self.job(function, folder)[0]

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """The folder that checkpoints are written to."""
        return tempfile.TemporaryDirectory(dir=self._settings.folder, prefix="bench_checkpoints_")

    def memory(self) -> list[Figure]:
        """The measurements of every case, ours and torch's."""
        figures = []
        with self.folder() as folder:
            self.job(prepare_memory, folder)
            for case in MEMORY_CASES:
                # Torch's asynchronous save copies the whole state first.
                for by_torch in (False,) if case == "asynchronous save" else (False, True):
                    ranks = self.job(measure_memory, folder, case, by_torch)
                    peak, allowed = (max(numbers) / MIB for numbers in zip(*ranks, strict=True))
                    if by_torch:
                        figures.append(Figure(f"{case}, {TORCH}", "MiB", [peak]))
                    else:
                        figures.append(Figure(f"{case}, {OURS}", "MiB", [peak], at_most=round(allowed, 1)))
        return figures


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Saving, loading, stalling and memory of checkpoints, beside torch's.")
    add_output_options(parser, "checkpoints")
    parser.add_argument("--megabytes", type=int, default=400, help="MiB of weights and optimizer states, about")
    parser.add_argument("--width", type=int, default=512, help="of the model: 12 x width squared parameters a block")
    parser.add_argument("--pairs", type=int, default=9, help="rounds of each comparison, after one to warm up")
    parser.add_argument("--tokens", type=int, default=64, help="in the micro-batch of a step")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS; 1 is what a launch by torch gives")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where checkpoints are written meanwhile")
    settings = parser.parse_args()
    # Before the server starts that the processes are forked from.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    facts = take_facts(("torch", "accelerate", "safetensors", "xxhash"))
    mount = subprocess.run(["df", "--output=fstype", settings.folder], capture_output=True, text=True, check=True)
    described = ("megabytes", "width", "pairs", "tokens", "threads")
    measuring = Measuring(settings)
    comparisons = [Comparison("s", TORCH, measuring.alone(measure_saves), "synchronous save", {OURS: OF_TORCH})]
    for case, rounds in measuring.alone(measure_loads).items():
        baseline = WITH_STATE_DICTS if "created" in case else TORCH
        comparisons.append(Comparison("s", baseline, rounds, case, {OURS: OF_TORCH}))
    first_stall, stalls = measuring.alone(measure_stalls)
    comparisons.append(Comparison("s", SYNCHRONOUS, stalls, "training held up by a save", {ASYNCHRONOUS: HELD_UP}))
    remarks = (
        [] if os.access(DROP_CACHES, os.W_OK) else [f"{DROP_CACHES} may not be written: all loads are from cache."]
    )
    record = Record(
        program="checkpoints",
        title="Checkpoints, beside torch.distributed.checkpoint",
        about=ABOUT,
        settings={name: getattr(settings, name) for name in described}
        | {"processes": WORLD_SIZE, "file system": mount.stdout.split()[-1]},
        facts=facts,
        comparisons=comparisons,
        figures=[
            Figure("training held up by a run's first asynchronous save", "s", [first_stall]),
            *measuring.memory(),
        ],
        remarks=remarks,
    )
    write_record(record, settings)


if __name__ == "__main__":
    main()
