"""Throughput: four models under several strategies, beside a bare compiled loop and Transformers' `Trainer`; three more
under DDP."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from gpu.jobs import JOBS, NUM_SAMPLES, Job, config_of, train_job, units_of_step
from gpu.kernels import KernelClock, longest_kernels
from gpu.machine import Gpus
from gpu.rows import SINGLE, Deadline, Launcher, NotMeasured, Part, Result, Row, not_measured
from largebatch.model.flops import multiplied_parameters, token_flops
from largebatch.system.hardware import find_gpu
from largebatch.task_folders import import_from
from paired import Contender, contender, start_job, take_turns
from record import OURS, Comparison, Figure

TITLE = "Throughput on one GPU"
ABOUT = """Time of an optimizer step on one GPU with one process: GPT-2 124M on 1,024 tokens, a Llama of 1.3 billion
parameters on 2,048, ResNet-50 and ViT-S/16 on 224 pixels, and without a bare loop CLIP ViT-B/32 with texts of 77 tokens
and BERT-Large, with generated samples, bf16 autocast, fp32 weights, `torch.compile`, scaled dot-product attention and
fused optimizers. `bare` is a compiled loop without a wrapper, `trainer` is Transformers' `Trainer`
(`bench/peers/throughput`), and `ours` is the shipped `train.py` with `--compute.compile=on`. Both of a pair stay alive
and take turns of some steps. The targets are at most 1.01 times the bare loop on DDP, 1.03 times on FSDP2 and ZeRO, and
the throughputs below on an H200. MFU is by the formula and the data sheets of `largebatch.model.flops`. The longest
kernels of a step are of turns of their own, under torch's profiler."""

BARE = "bare"
TRAINER = "trainer"
LIMITS = {"ddp": 1.01, "fsdp": 1.03, "zero1": 1.03, "zero2": 1.03, "zero3": 1.03}
# What matters most first; a bare loop is shared by all that follow it in its line.
CASES = (
    ("gpt2_124m", ("ddp",)),
    ("llama_1b", ("ddp",)),
    ("resnet50", ("ddp",)),
    ("vit_s16", ("ddp",)),
    ("llama_1b", ("fsdp",)),
    ("gpt2_124m", ("fsdp", "zero1", TRAINER)),
    ("resnet50", (TRAINER,)),
    ("vit_s16", ("fsdp", TRAINER)),
    ("gpt2_124m", ("zero2", "zero3")),
)
ALONE = ("clip_b32", "bert_large_128", "bert_large_512")


class Turns(NamedTuple):
    """Rounds of a pair, optimizer steps of a turn, and steps before the first one."""

    rounds: int
    steps: int
    warmup: int

    @classmethod
    def of(cls, is_small: bool) -> "Turns":
        """Few of them in a rehearsal."""
        return cls(2, 1, 1) if is_small else cls(3, 5, 5)


# --- contenders -------------------------------------------------------------------------------------------------------


def ours(connections: Sequence[Connection], run_dir: Path, name: str, is_small: bool) -> None:
    """The recipe's train.py as it is shipped, with a clock behind each update."""
    clock = clock_of(connections, is_small)
    _, words = config_of(JOBS[name], is_small)
    train_job(JOBS[name], words, run_dir, lambda _: clock.step())


def peer(connections: Sequence[Connection], kind: str, name: str, is_small: bool) -> None:
    """The bare loop, or the Trainer, on the recipe's model."""
    from peers.throughput import bare, trainer
    from peers.throughput.job import Images, Tokens
    from peers.throughput.job import Job as PeerJob

    config, _ = config_of(JOBS[name], is_small)
    torch.manual_seed(0)
    is_image = JOBS[name].unit == "images"
    if is_image:
        samples = Images(NUM_SAMPLES, config.data.image_size, config.data.num_classes)
    else:
        samples = Tokens(NUM_SAMPLES, config.data.block_size, config.model.vocab_size)
    own = ("momentum", "nesterov") if config.optimizer.name == "sgd" else ("betas", "eps")
    job = PeerJob(
        model=import_from(JOBS[name].path.parent, "model").build_model(config),
        samples=samples,
        micro_batch_size=config.batch.micro_batch_size,
        accumulation=config.batch.global_batch_size // config.batch.micro_batch_size,
        optimizer={field: getattr(config.optimizer, field) for field in (*own, "weight_decay")},
        clip_norm=config.optimizer.clip_norm,
        compile_backend="eager" if is_small else "inductor",
        is_image=is_image,
    )
    train = bare.train if kind == BARE else trainer.train
    train(clock_of(connections, is_small), job)


def clock_of(connections: Sequence[Connection], is_small: bool) -> KernelClock:
    """The clock of the only process."""
    turns = Turns.of(is_small)
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else bool
    return KernelClock(connections[0], turns.steps, turns.warmup, synchronise)


@contextmanager
def contender_of(name: str, kind: str, is_small: bool, launcher: Launcher, deadline: Deadline) -> Iterator[Contender]:
    """A job's bare loop, the Trainer, or ours under a strategy, which has warmed up."""
    with tempfile.TemporaryDirectory() as folder:
        if kind in (BARE, TRAINER):
            start = start_job(peer, kind, name, is_small, **launcher.options(SINGLE, deadline))
        else:
            start = start_job(ours, Path(folder, "run"), name, is_small, **launcher.options(kind, deadline))
        with contender(start, 1) as started:
            yield started


class Shared:
    """A contender that several rows need: the first of them starts it, and the stack ends it."""

    def __init__(self, name: str, kind: str, is_small: bool, launcher: Launcher, stack: ExitStack):
        self._kind = kind
        self._start = partial(contender_of, name, kind, is_small, launcher)
        self._stack = stack
        self._contender: Contender | None = None
        self._was_started = False

    def start(self, deadline: Deadline) -> Contender:
        """The contender, which has warmed up.

        Raises:
            NotMeasured: It could not be started for an earlier row, or its engine is not installed.
        """
        if self._contender is None:
            if self._was_started:
                raise NotMeasured(f"{self._kind} failed before")
            self._was_started = True
            self._contender = self._stack.enter_context(self._start(deadline))
        return self._contender


# --- rows -------------------------------------------------------------------------------------------------------------


def utilization(job: Job, is_small: bool, gpu: str, units_per_second: float) -> float | None:
    """Model FLOPs utilization of a language model; None if there is no data sheet of the GPU."""
    config, _ = config_of(job, is_small)
    found = find_gpu(gpu)
    peak = found.peak_tflops(config.precision) if found else None
    if peak is None:
        return None
    with torch.device("meta"):
        model = import_from(job.path.parent, "model").build_model(config)
    shape = (config.model.num_layers, config.model.hidden_size, config.data.block_size)
    return units_per_second * token_flops(*multiplied_parameters(model), *shape) / (peak * 1e12)


def throughput(job: Job, comparison: Comparison, gpus: Gpus) -> list[Result]:
    """Units per second of ours on DDP, from the samples of its pair; the MFU of a language model."""
    is_small = gpus.count == 0
    config, _ = config_of(job, is_small)
    units = units_of_step(job, config)
    what = f"{job.title}, ours on ddp"
    samples = [units / each[OURS] for each in comparison.rounds]
    # What a small model reaches says nothing.
    results: list[Result] = [Figure(what, f"{job.unit}/s", samples, at_least=None if is_small else job.at_least)]
    if job.unit == "tokens":
        mfu = utilization(job, is_small, gpus.name, units / comparison.median(OURS))
        unknown = f"largebatch.system.hardware has no data sheet of {gpus.name or 'a CPU'}"
        what += ": MFU"
        results += not_measured(what, unknown) if mfu is None else [Figure(what, "", [mfu])]
    return results


def pair(name: str, kind: str, contenders: dict[str, Shared], gpus: Gpus, deadline: Deadline) -> list[Result]:
    """One row: the pair, and from ours on DDP its throughput."""
    is_small = gpus.count == 0
    started = {who: each.start(deadline) for who, each in contenders.items()}
    print(title_of(name, kind), file=sys.stderr, flush=True)
    measured = take_turns(started, Turns.of(is_small).rounds)
    limits = {} if is_small or kind == TRAINER else {OURS: LIMITS[kind]}
    comparison = Comparison("s per step", BARE, measured, title_of(name, kind), limits)
    return [comparison, *(throughput(JOBS[name], comparison, gpus) if kind == "ddp" else [])]


def alone(name: str, gpus: Gpus, launcher: Launcher, deadline: Deadline) -> list[Result]:
    """One row: the throughput of a job that has no bare loop."""
    is_small = gpus.count == 0
    with contender_of(name, "ddp", is_small, launcher, deadline) as started:
        rounds = take_turns({OURS: started}, Turns.of(is_small).rounds)
    return throughput(JOBS[name], Comparison("s per step", OURS, rounds), gpus)


def kernels(title: str, contenders: dict[str, Shared], deadline: Deadline) -> list[Result]:
    """One row: the longest kernels of both of a pair."""
    return longest_kernels(title, {name: each.start(deadline) for name, each in contenders.items()})


def title_of(name: str, kind: str) -> str:
    """A pair for people."""
    return f"{JOBS[name].title}, {'Trainer' if kind == TRAINER else kind}"


def rows(gpus: Gpus) -> Iterator[Row]:
    """The pairs; a bare loop ends with the last row of its line, its partner with its own rows."""
    is_small = gpus.count == 0
    launcher = Launcher(1, [*LIMITS])
    for name, kinds in CASES:
        with ExitStack() as stack:
            baseline = Shared(name, BARE, is_small, launcher, stack)
            for kind in kinds:
                with ExitStack() as inner:
                    other = Shared(name, kind, is_small, launcher, inner)
                    contenders = {BARE: baseline, TRAINER if kind == TRAINER else OURS: other}
                    title = title_of(name, kind)
                    yield Row(title, partial(pair, name, kind, contenders, gpus))
                    if kind == "ddp":
                        yield Row(f"{title}: kernels", partial(kernels, title, contenders))
    for name in ALONE:
        yield Row(title_of(name, "ddp"), partial(alone, name, gpus, launcher))


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows."""
    part.measure(rows(gpus))
