"""Throughput: three models under several strategies, beside a bare compiled loop and Transformers' `Trainer`."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from gpu.machine import Gpus
from gpu.rows import Deadline, NotMeasured, Part, Result, Row, why_not
from gpu_throughput import ABOUT as ABOUT_THE_PAIRS
from gpu_throughput import JOBS, bare_loop, compare_one, config_of, figure_of, units_of_step
from record import OURS, Comparison, Figure

TITLE = "Throughput on one GPU, in brief"
ABOUT = f"""{ABOUT_THE_PAIRS} MFU is by the formula and the data sheets of `largebatch.estimate.flops`."""

# What matters most first; a bare loop is shared by all that follow it in its line.
CASES = {
    "gpt2_124m": ("ddp", "trainer", "zero1", "fsdp"),
    "llama_1b": ("ddp", "fsdp"),
    "resnet50": ("ddp", "trainer"),
}


class Bare:
    """The bare loop of a job, which is started by the first row that needs it."""

    def __init__(self, name: str, stack: ExitStack):
        self._name, self._stack = name, stack
        self._contender: Any = None

    def compare(self, strategy: str, options: argparse.Namespace) -> Comparison:
        """Measure ours or the Trainer beside it."""
        if self._contender is None:
            self._contender = self._stack.enter_context(bare_loop(self._name, options))
        return compare_one(self._name, strategy, self._contender, options)


def utilization(name: str, is_small: bool, gpu: str, units_per_second: float) -> float | None:
    """Model FLOPs utilization of a language model; None if there is no data sheet of the GPU."""
    import torch

    from largebatch.estimate.flops import multiplied_parameters, token_flops
    from largebatch.estimate.hardware import find_gpu
    from largebatch.task_folders import import_from

    config, _ = config_of(JOBS[name], is_small)
    found = find_gpu(gpu)
    peak = found.peak_tflops(config.precision) if found else None
    if peak is None:
        return None
    with torch.device("meta"):
        model = import_from(JOBS[name].path.parent, "model").build_model(config)
    shape = (config.model.num_layers, config.model.hidden_size, config.data.block_size)
    return units_per_second * token_flops(*multiplied_parameters(model), *shape) / (peak * 1e12)


def pair(bare: Bare, name: str, strategy: str, gpus: Gpus, deadline: Deadline) -> list[Result]:
    """One row: the pair, and from ours on DDP its throughput."""
    why = None if strategy == "trainer" else why_not(strategy)
    if why is not None:
        raise NotMeasured(why)
    is_small = gpus.count == 0
    turns = {"rounds": 2, "steps": 1, "warmup": 1} if is_small else {"rounds": 3, "steps": 5, "warmup": 5}
    comparison = bare.compare(strategy, argparse.Namespace(toy=is_small, timeout=deadline.seconds_left, **turns))
    results: list[Result] = [comparison]
    if strategy == "ddp":
        config, _ = config_of(JOBS[name], is_small)
        units = units_of_step(config)
        results.append(figure_of(name, [comparison], units, is_small))
        if config.data.tokens_per_sample is not None:
            mfu = utilization(name, is_small, gpus.name, units / comparison.median(OURS))
            results.append(Figure(f"{JOBS[name].title}, ours on ddp: MFU", "", [] if mfu is None else [mfu]))
    return results


def rows(gpus: Gpus) -> Iterator[Row]:
    """The pairs; the bare loop of a job ends with its last row."""
    for name, strategies in CASES.items():
        with ExitStack() as stack:
            bare = Bare(name, stack)
            for strategy in strategies:
                yield Row(f"{JOBS[name].title}, {strategy}", partial(pair, bare, name, strategy, gpus))


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows."""
    part.measure(rows(gpus))
