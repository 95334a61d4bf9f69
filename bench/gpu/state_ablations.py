"""Ablations of optimizers and checkpoints. Each takes whether its sizes are small, for a rehearsal on the CPU."""

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpu.jobs import JOBS, Enough, config_of, train_job
from gpu.models import BERT_LAMB, RESNET_LARS, build
from gpu.rows import Result
from gpu.turns import GIB, device, timed
from largebatch.optim import build_optimizer
from largebatch.optim.layerwise import Layers
from largebatch.plan import resolve
from largebatch.run.checkpoint.save import CheckpointWriter
from record import Figure


def lars(is_small: bool) -> list[Result]:
    """LARS on ResNet-50."""
    return _optimizer_step(RESNET_LARS, "LARS on ResNet-50", is_small)


def lamb(is_small: bool) -> list[Result]:
    """LAMB on BERT-Large."""
    return _optimizer_step(BERT_LAMB, "LAMB on BERT-Large", is_small)


def _optimizer_step(recipe: str, title: str, is_small: bool) -> list[Result]:
    """Time and kernel launches of a layerwise optimizer's step."""
    from torch.profiler import ProfilerActivity, profile

    config, model = build(recipe, is_small)
    optimizer = build_optimizer(model, resolve(config, 64))
    trained = [each for each in model.parameters() if each.requires_grad]
    # As the strategies do, in a process that has every layer whole.
    optimizer.set_layers(Layers.whole(trained))
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    for _ in range(3):
        optimizer.step()
    seconds = [timed(optimizer.step, 5)[0] for _ in range(2)]
    on_gpu = device().type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        optimizer.step()
    # Of the runtime's and of the driver's interface; on a CPU, torch's own operations.
    starts = ("cudaLaunchKernel", "cuLaunchKernel") if on_gpu else ("aten::",)
    launches = sum(each.count for each in profiler.key_averages() if each.key.startswith(starts))
    return [
        Figure(f"{title}: a step of the optimizer", "s", seconds),
        Figure(f"{title}: {'kernel launches' if on_gpu else 'operations'} of a step", "", [launches]),
    ]


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
