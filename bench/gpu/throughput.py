"""Throughput: three models under several strategies, beside a bare compiled loop and Transformers' `Trainer`."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from gpu.ceilings import ceilings
from gpu.kernels import longest_kernels
from gpu.machine import Gpus
from gpu.rows import SINGLE, Deadline, Launcher, NotMeasured, Part, Result, Row, not_measured, why_not
from gpu_throughput import ABOUT as ABOUT_THE_PAIRS
from gpu_throughput import JOBS, compare_pair, config_of, contender_of, figure_of, units_of_step
from paired import Contender
from record import OURS, Figure

TITLE = "Throughput on one GPU, in brief"
ABOUT = f"""{ABOUT_THE_PAIRS} MFU is by the formula and the data sheets of `largebatch.model.flops`.
The longest kernels of a step are of turns of their own, under torch's profiler."""

# What matters most first; a bare loop is shared by all that follow it in its line.
CASES = (
    ("gpt2_124m", ("ddp",)),
    ("llama_1b", ("ddp",)),
    ("resnet50", ("ddp",)),
    ("llama_1b", ("fsdp",)),
    ("gpt2_124m", ("fsdp", "zero1", "trainer")),
    ("resnet50", ("trainer",)),
)


class Shared:
    """A contender that several rows need: the first of them starts it, and the stack ends it."""

    def __init__(self, name: str, kind: str, is_small: bool, stack: ExitStack):
        self._name, self._kind, self._is_small, self._stack = name, kind, is_small, stack
        self._contender: Contender | None = None
        self._was_started = False

    def start(self, deadline: Deadline) -> Contender:
        """The contender, which has warmed up.

        Raises:
            NotMeasured: It could not be started for an earlier row.
        """
        if self._contender is None:
            if self._was_started:
                raise NotMeasured(f"{self._kind} failed before")
            self._was_started = True
            options = turns(self._is_small, deadline)
            self._contender = self._stack.enter_context(contender_of(self._name, self._kind, options))
        return self._contender


def turns(is_small: bool, deadline: Deadline) -> argparse.Namespace:
    """Options of the contenders: rounds, and the steps of a turn."""
    sizes = {"rounds": 2, "steps": 1, "warmup": 1} if is_small else {"rounds": 3, "steps": 5, "warmup": 5}
    return argparse.Namespace(toy=is_small, timeout=deadline.seconds_left, **sizes)


def utilization(name: str, is_small: bool, gpu: str, units_per_second: float) -> float | None:
    """Model FLOPs utilization of a language model; None if there is no data sheet of the GPU."""
    import torch

    from largebatch.model.flops import multiplied_parameters, token_flops
    from largebatch.system.hardware import find_gpu
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


def pair(name: str, kind: str, contenders: dict[str, Shared], gpus: Gpus, deadline: Deadline) -> list[Result]:
    """One row: the pair, and from ours on DDP its throughput."""
    why = None if kind == "trainer" else why_not(kind)
    if why is not None:
        raise NotMeasured(why)
    is_small = gpus.count == 0
    bare, other = (each.start(deadline) for each in contenders.values())
    comparison = compare_pair(name, kind, bare, other, turns(is_small, deadline))
    results: list[Result] = [comparison]
    if kind == "ddp":
        config, _ = config_of(JOBS[name], is_small)
        units = units_of_step(config)
        results.append(figure_of(name, [comparison], units, is_small))
        if config.data.tokens_per_sample is not None:
            mfu = utilization(name, is_small, gpus.name, units / comparison.median(OURS))
            what = f"{JOBS[name].title}, ours on ddp: MFU"
            unknown = f"largebatch.system.hardware has no data sheet of {gpus.name or 'a CPU'}"
            results += not_measured(what, unknown) if mfu is None else [Figure(what, "", [mfu])]
    return results


def kernels(title: str, contenders: dict[str, Shared], deadline: Deadline) -> list[Result]:
    """One row: the longest kernels of both of a pair."""
    return longest_kernels(title, {name: each.start(deadline) for name, each in contenders.items()})


def rows(gpus: Gpus) -> Iterator[Row]:
    """The machine, then the pairs; a bare loop ends with the last row of its line, its partner with its own rows."""
    is_small = gpus.count == 0
    launcher = Launcher(1, ())
    yield Row("ceilings of the GPU", lambda deadline: launcher.run(deadline, SINGLE, ceilings, is_small))
    for name, kinds in CASES:
        with ExitStack() as stack:
            bare = Shared(name, "bare", is_small, stack)
            for kind in kinds:
                with ExitStack() as inner:
                    title = f"{JOBS[name].title}, {kind}"
                    contenders = {"bare": bare, OURS: Shared(name, kind, is_small, inner)}
                    yield Row(title, partial(pair, name, kind, contenders, gpus))
                    if kind == "ddp":
                        yield Row(f"{title}: kernels", partial(kernels, title, contenders))


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows."""
    part.measure(rows(gpus))
