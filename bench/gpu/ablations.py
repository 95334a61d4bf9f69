"""Ablations: what single choices cost in time and memory, each in a process of its own."""

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu.jobs import JOBS, Enough, config_of, train_job
from gpu.machine import Gpus
from gpu.rows import SINGLE, Deadline, Launcher, Part, Result, Row
from gpu.turns import GIB, device
from largebatch.run.checkpoint.save import CheckpointWriter
from record import Figure

TITLE = "Ablations on one GPU"
ABOUT = "What single choices cost: how long the first two asynchronous checkpoints of GPT-2 large hold up a step."


def asynchronous_checkpoint(is_small: bool) -> list[Result]:
    """How long a run's first and second asynchronous checkpoint hold it up, and the memory they lock."""
    job = JOBS["gpt2_124m"]
    held: list[float] = []
    writers: list[CheckpointWriter] = []
    save = CheckpointWriter.save
    wait = CheckpointWriter.wait_until_copied

    def timed_save(writer: CheckpointWriter, step: int, about: Callable[[], dict[str, Any]]) -> None:
        # The one before may still be written, which is not what is measured.
        writer.wait()
        writers.append(writer)
        started = time.perf_counter()
        save(writer, step, about)
        held.append(time.perf_counter() - started)

    def timed_wait(writer: CheckpointWriter) -> None:
        started = time.perf_counter()
        wait(writer)
        if held:
            held[-1] += time.perf_counter() - started
        if len(held) == 2:
            raise Enough

    _, words = config_of(job, is_small)
    # GPT-2 large, whose weights and two moments take 8.6 GiB.
    words += [] if is_small else ["--model.hidden_size=1280", "--model.num_layers=36", "--model.num_heads=20"]
    words += [] if is_small else ["--batch.global_batch_size=8", "--batch.micro_batch_size=8"]
    words += ["--compute.compile=off", '--checkpoint.every={"steps": 2}', "--checkpoint.keep_last=1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(CheckpointWriter, "save", timed_save),
        patch.object(CheckpointWriter, "wait_until_copied", timed_wait),
    ):
        with suppress(Enough):
            train_job(job, words, Path(folder, "run"), lambda _: None)
        writers[-1].wait()
        state = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors")) / GIB
    results: list[Result] = [
        Figure("first asynchronous checkpoint: the step held up", "s", held[:1]),
        Figure("second asynchronous checkpoint: the step held up", "s", held[1:]),
    ]
    if device().type == "cuda":
        locked = writers[-1]._staging._buffer.nbytes / GIB
        results.append(Figure(f"page-locked memory, for checkpoints of {state:.3g} GiB", "GiB", [locked]))
    return results


def measure(part: Part, gpus: Gpus) -> None:
    """Measure the row."""
    launcher = Launcher(1, [])

    def row(deadline: Deadline) -> list[Result]:
        results: list[Result] = launcher.run(deadline, SINGLE, asynchronous_checkpoint, gpus.count == 0)
        return results

    part.measure([Row("asynchronous checkpoint", row)])
