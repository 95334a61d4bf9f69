"""Memory: the peak of a GPU's memory in training, beside what `largebatch plan` says."""

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gpu.jobs import JOBS, Enough, config_of, train_job
from gpu.machine import Gpus
from gpu.rows import ON_THE_CPU, Deadline, Launcher, Part, Result, Row
from largebatch.__main__ import main
from largebatch.run import Step
from record import Figure, resident

TITLE = "Peak memory on a GPU, beside the plan"
ABOUT = """`torch.cuda.max_memory_allocated` of the first process in the first three steps of a recipe, divided by what
`largebatch plan` expects: model states, transient memory and activations. The aim is within 5 %. Recipes are those of
`bench/gpu/jobs.py`, with generated samples and without `torch.compile`."""

STEPS = 3
TOLERANCE = 0.05
GIB = 2**30
RECOMPUTED, SELECTIVE = (f"--compute.activation_checkpointing={what}" for what in ("full", "selective"))
# Recipe, strategy and overrides; what differs most from its neighbors first.
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    ("gpt2_124m", "ddp", ()),
    ("llama_1b", "ddp", (RECOMPUTED,)),
    ("llama_1b", "ddp", (SELECTIVE,)),
    ("resnet50", "ddp", ()),
    ("gpt2_124m", "fsdp", ()),
    ("gpt2_124m", "zero1", ()),
    ("gpt2_124m", "zero2", ()),
    ("gpt2_124m", "zero3", ()),
    ("gpt2_124m", "ddp", (RECOMPUTED,)),
    ("gpt2_124m", "ddp", (SELECTIVE,)),
    ("llama_1b", "fsdp", (RECOMPUTED,)),
    ("gpt2_124m", "ddp", ("--precision=fp32", "--batch.micro_batch_size=16")),
    ("llama_1b", "ddp", ()),
    ("llama_1b", "zero3", (RECOMPUTED,)),
    ("llama_1b", "zero3", (SELECTIVE,)),
    ("llama_1b", "fsdp", ()),
    ("gpt2_124m", "fsdp", (RECOMPUTED,)),
    ("gpt2_124m", "zero1", (RECOMPUTED,)),
    ("llama_1b", "zero1", (RECOMPUTED,)),
]


def overrides(name: str, more: Sequence[str], is_small: bool) -> list[str]:
    """The overrides of a case."""
    _, words = config_of(JOBS[name], is_small)
    words = [*words, "--compute.compile=off", "--logging.trackers=[]", *more]
    return [word for word in words if not is_small or word != "--batch.micro_batch_size=16"]


def peak_of(name: str, words: Sequence[str], run_dir: Path) -> int:
    """Train in this process, and return the peak in bytes: on a CPU, of the resident set beyond its start."""
    before = resident("VmRSS")
    peaks = []

    def look(step: Step) -> None:
        if step.index + 1 == STEPS:
            on_gpu = torch.cuda.is_available()
            peaks.append(torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM") - before)
            # What follows the steps, such as a checkpoint, is none of them.
            raise Enough

    with suppress(Enough):
        train_job(JOBS[name], words, run_dir, look)
    return peaks[0]


def planned(name: str, words: Sequence[str], world_size: int) -> dict[str, int]:
    """The bytes that `largebatch plan` expects in the fullest process, by strategy."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        # With so much memory, gradients are reduced with the last micro-batch.
        command = ["plan", str(JOBS[name].path), f"--world-sizes={world_size}", "--gpu-memory=1000", "--json"]
        code = main([*command, *words])
    if code:
        raise RuntimeError(f"largebatch plan ended with exit code {code}")
    column = json.loads(printed.getvalue())["world_sizes"][0]
    return {strategy: int(each["total_bytes_estimate"]) for strategy, each in column["strategies"].items()}


def compare(
    launcher: Launcher, case: tuple[str, str, tuple[str, ...]], is_small: bool, deadline: Deadline
) -> list[Result]:
    """The ratio of one case."""
    name, strategy, more = case
    words = overrides(name, more, is_small)
    plan = launcher.run(deadline, "single", planned, name, words, launcher.world_size, environment=ON_THE_CPU)
    expected = plan[strategy]
    with TemporaryDirectory() as folder:
        peak = launcher.run(deadline, strategy, peak_of, name, words, Path(folder, "run"))
    # A process's own memory on a CPU says nothing about the plan.
    aims = {} if is_small else {"at_least": 1 - TOLERANCE, "at_most": 1 + TOLERANCE}
    what = f"{title_of(case)}: {peak / GIB:.2f} GiB of the plan's {expected / GIB:.2f}"
    return [Figure(what, "", [peak / expected], **aims)]


def title_of(case: tuple[str, str, tuple[str, ...]]) -> str:
    """The case for people."""
    name, strategy, words = case
    return ", ".join([JOBS[name].title, strategy, *(word.removeprefix("--") for word in words)])


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows."""
    is_small = gpus.count == 0
    launcher = Launcher(1, sorted({strategy for _, strategy, _ in CASES}))
    part.measure(Row(title_of(case), partial(compare, launcher, case, is_small)) for case in CASES)
