"""Tokens and images per second on one CUDA GPU: the shipped train.py under every strategy, beside a bare compiled loop.

    .venv/bin/python bench/gpu_throughput.py            # on a machine with a GPU; some 40 minutes
    .venv/bin/python bench/gpu_throughput.py --toy      # the same code on CPU at a toy size; its numbers mean nothing

GPT-2 124M, a Llama of 1.3 billion parameters and ResNet-50, in bf16 autocast, on generated samples. `ours` is a
recipe's own train.py as it is shipped, with other numbers from the command line; the bare loop and Transformers'
`Trainer` are in bench/peers/throughput. Of each pair both are alive at once and take turns.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paired import Contender, TurnClock, contender, start_job, take_turns
from record import OURS, ROOT, Comparison, Figure, Record, add_output_options, read_record, take_facts, write_record

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
LIMITS = dict.fromkeys(STRATEGIES, 1.03) | {"ddp": 1.01}
NUM_SAMPLES = 4096
ABOUT = """Time of an optimizer step on one GPU with one process: GPT-2 124M on 1,024 tokens, a Llama of 1.3 billion
parameters on 2,048, and ResNet-50 on 224 pixels, with generated samples, bf16 autocast, fp32 weights, `torch.compile`,
scaled dot-product attention and fused optimizers. `bare` is a compiled loop without a wrapper, `trainer` is
Transformers' `Trainer` (`bench/peers/throughput`), and `ours` is the shipped `train.py` with `--compute.compile=on`.
Both of a pair stay alive and take turns of some steps. The targets are at most 1.01 times the bare loop on DDP, 1.03
times on FSDP2 and ZeRO, and the throughputs below on an H200."""


@dataclass(frozen=True)
class Job:
    """A recipe, made the job that is measured.

    Args:
        title: For people.
        recipe: Relative to recipes/.
        overrides: Overrides of the recipe.
        toy: Further ones that make it a toy.
        unit: The unit that is counted.
        at_least: Units per second that are aimed at on one H200.
    """

    title: str
    recipe: str
    overrides: tuple[str, ...]
    toy: tuple[str, ...]
    unit: str
    at_least: float

    @property
    def path(self) -> Path:
        """The path of the recipe."""
        return ROOT / "recipes" / self.recipe


TOY_BATCH = ("--batch.global_batch_size=4", "--batch.micro_batch_size=2")
JOBS = {
    "gpt2_124m": Job(
        "GPT-2 124M",
        "causal_lm/gpt2_124m.json",
        ("--batch.global_batch_size=128", "--batch.micro_batch_size=32"),
        ("--model.hidden_size=32", "--model.num_layers=2", "--model.num_heads=2", "--model.vocab_size=256"),
        "tokens",
        450_000,
    ),
    "llama_1b": Job(
        "Llama 1.3B",
        "causal_lm/llama_1b.json",
        (
            "--model.vocab_size=32000",
            "--model.intermediate_size=5632",
            "--model.num_layers=24",
            "--model.num_heads=16",
            "--model.num_kv_heads=16",
            "--batch.global_batch_size=16",
            "--batch.micro_batch_size=4",
        ),
        (
            "--model.hidden_size=32",
            "--model.intermediate_size=64",
            "--model.num_layers=2",
            "--model.num_heads=2",
            "--model.num_kv_heads=2",
            "--model.vocab_size=256",
        ),
        "tokens",
        54_000,
    ),
    "resnet50": Job(
        "ResNet-50",
        "image_classification/resnet50_imagenet_256.json",
        ("--precision=bf16", "--batch.global_batch_size=256", "--batch.micro_batch_size=256"),
        ("--data.image_size=32", "--model.embedding_size=8", "--model.hidden_sizes=[8, 16]", "--model.depths=[1, 1]"),
        "images",
        3_000,
    ),
}


def config_of(job: Job, toy: bool) -> tuple[Any, list[str]]:
    """The recipe's config for the job, and the overrides that make it."""
    from largebatch.config import load_config

    words = [
        *job.overrides,
        f"--data.num_train_samples={NUM_SAMPLES}",
        "--data.num_eval_samples=16",
        # More than will be measured, at a constant rate.
        '--train.duration={"epochs": 1000}',
        "--learning_rate.warmup=null",
        '--learning_rate.decay={"name": "constant"}',
        "--evaluation.every=null",
        "--checkpoint.every=null",
        "--data.num_workers=4",
    ]
    if toy:
        words += [*job.toy, *TOY_BATCH, "--data.num_workers=0"]
        words += ["--data.block_size=16"] if job.unit == "tokens" else []
    else:
        words.append("--compute.compile=on")
    return load_config(job.path, words), words


def units_of_step(config: Any) -> int:
    """Tokens or images of an optimizer step."""
    return config.batch.global_batch_size * (config.data.tokens_per_sample or 1)


# --- contenders -------------------------------------------------------------------------------------------------------


def ours(connections: Sequence[Connection], folder: str, name: str, toy: bool, steps: int, warmup: int) -> None:
    """The recipe's train.py as it is shipped, with generated samples and a clock behind each update."""
    from gpu.compiled import train_compiled
    from largebatch.run import Run, Step
    from largebatch.task_folders import import_from

    clock = _clock(connections, steps, warmup)
    update = Run.update

    def timed_update(run: Run[Any], step: Step) -> None:
        update(run, step)
        clock.step()

    Run.update = timed_update
    job = JOBS[name]
    import_from(job.path.parent, "data").sources = generated_sources
    _, words = config_of(job, toy)
    train_compiled(job.path, *words, run_dir=Path(folder, "run"))


def generated_sources(config: Any) -> tuple[Any, Any]:
    """Training and evaluation samples like the recipe's, of random numbers."""
    import numpy as np
    import torch

    from largebatch.data.images import TensorImages
    from largebatch.data.text import TokenBlocks
    from largebatch.data.token_stream import TokenStream

    random, sizes = np.random.default_rng(0), (config.data.num_train_samples, config.data.num_eval_samples)
    if config.data.tokens_per_sample is not None:
        block = config.data.block_size
        numbers = random.integers(0, config.model.vocab_size, max(sizes) * block + 1, dtype=np.uint16)
        tokens = TokenStream.in_memory([numbers])
        first, second = (TokenBlocks(tokens, block, size, "samples") for size in sizes)
        return first, second
    side = config.data.image_size
    pixels = torch.from_numpy(random.integers(0, 256, (max(sizes), 3, side, side), dtype=np.uint8))
    labels = torch.from_numpy(random.integers(0, config.data.num_classes, max(sizes)))
    first, second = (TensorImages(pixels[:size], labels[:size]) for size in sizes)
    return first, second


def peer(connections: Sequence[Connection], kind: str, name: str, toy: bool, steps: int, warmup: int) -> None:
    """The bare loop, or the Trainer, on the recipe's model."""
    import torch

    from largebatch.task_folders import import_from
    from peers.throughput import bare, trainer
    from peers.throughput.job import Images, Tokens
    from peers.throughput.job import Job as PeerJob

    job = JOBS[name]
    config, _ = config_of(job, toy)
    torch.manual_seed(0)
    is_image = job.unit == "images"
    samples = (
        Images(NUM_SAMPLES, config.data.image_size, config.data.num_classes)
        if is_image
        else Tokens(NUM_SAMPLES, config.data.block_size, config.model.vocab_size)
    )
    names = ("momentum", "nesterov", "weight_decay") if is_image else ("betas", "eps", "weight_decay")
    {"bare": bare, "trainer": trainer}[kind].train(
        _clock(connections, steps, warmup),
        PeerJob(
            model=import_from(job.path.parent, "model").build_model(config),
            samples=samples,
            micro_batch_size=config.batch.micro_batch_size,
            accumulation=config.batch.global_batch_size // config.batch.micro_batch_size,
            optimizer={name: getattr(config.optimizer, name) for name in names},
            clip_norm=config.optimizer.clip_norm,
            compile_backend="eager" if toy else "inductor",
            is_image=is_image,
        ),
    )


def _clock(connections: Sequence[Connection], steps: int, warmup: int) -> TurnClock:
    import torch

    from gpu.kernels import KernelClock

    return KernelClock(connections[0], steps, warmup, torch.cuda.synchronize if torch.cuda.is_available() else bool)


# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def contender_of(name: str, kind: str, options: argparse.Namespace) -> Iterator[Contender]:
    """The bare loop of a job, the Trainer, or ours under a strategy, on one process."""
    from largebatch.tools.accelerate_configs import launch_environment

    shared = name, options.toy, options.steps, options.warmup
    settings = {"world_size": 1, "environment": {}, "folder": ROOT, "timeout": options.timeout}
    with tempfile.TemporaryDirectory() as folder:
        if kind in ("bare", "trainer"):
            start = start_job(peer, kind, *shared, **settings)
        else:
            settings["environment"] = launch_environment(ROOT / f"recipes/accelerate_configs/{kind}.yaml", 1)
            start = start_job(ours, folder, *shared, **settings)
        with contender(start, 1) as started:
            yield started


def compare_pair(name: str, kind: str, bare: Contender, other: Contender, options: argparse.Namespace) -> Comparison:
    """The Trainer, or ours under a strategy, beside the bare loop."""
    is_trainer = kind == "trainer"
    print(f"{JOBS[name].title}, {kind}", file=sys.stderr, flush=True)
    measured = take_turns({"bare": bare, "trainer" if is_trainer else OURS: other}, options.rounds)
    # What a toy takes says nothing.
    limits = {} if options.toy or is_trainer else {OURS: LIMITS[kind]}
    return Comparison("s per step", "bare", measured, _case(name, kind), limits)


def _case(name: str, kind: str) -> str:
    return f"{JOBS[name].title}, {'Trainer' if kind == 'trainer' else kind}"


def compare(name: str, strategies: Sequence[str], options: argparse.Namespace) -> list[Comparison]:
    """The pairs of one job: ours under each strategy and the Trainer, each beside the same bare loop."""
    comparisons = []
    with contender_of(name, "bare", options) as bare:
        for kind in (*strategies, "trainer"):
            with contender_of(name, kind, options) as other:
                comparisons.append(compare_pair(name, kind, bare, other, options))
    return comparisons


def figure_of(name: str, comparisons: Sequence[Comparison], units: int, toy: bool) -> Figure:
    """Units per second of ours on DDP, from the same samples; none where it is not measured."""
    job = JOBS[name]
    rounds = next((each.rounds for each in comparisons if each.case == f"{job.title}, ddp"), [])
    samples = [units / each[OURS] for each in rounds]
    return Figure(f"{job.title}, ours on ddp", f"{job.unit}/s", samples, at_least=None if toy else job.at_least)


def unmeasured(name: str, strategies: Sequence[str]) -> list[Comparison]:
    """The comparisons, without measurements."""
    limits: dict[str, dict[str, float]] = {strategy: {OURS: LIMITS[strategy]} for strategy in strategies}
    limits["trainer"] = {}
    return [Comparison("s per step", "bare", [], _case(name, kind), each) for kind, each in limits.items()]


def gpu_name() -> str | None:
    """Asked for in a process of its own, because processes with a GPU cannot be forked."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    result = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return result.stdout.strip() or None


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description="Tokens and images per second on one GPU, beside a bare compiled loop."
    )
    add_output_options(parser, "gpu_throughput")
    parser.add_argument("--toy", action="store_true", help="a toy size on the CPU: only to see that it works")
    parser.add_argument("--jobs", default=",".join(JOBS), help="default: all of them")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: all of them")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of turns; default: 9")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a turn; default: 10")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first turn; default: 10")
    options = parser.parse_args()
    # Of a job, in seconds.
    options.timeout = 7200
    if options.toy:
        if options.json is None:
            parser.error("--toy measures nothing that belongs into bench/results; name a file with --json OUT")
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    gpu = None if options.toy else gpu_name()
    facts = take_facts(("torch", "accelerate", "deepspeed", "transformers"), gpu)
    strategies = options.strategies.split(",")
    comparisons: list[Comparison] = []
    figures: list[Figure] = []
    if gpu is None and not options.toy:
        print("there is no GPU here: nothing is measured", file=sys.stderr)
        file = options.json or options.results / "cuda.json"
        if file.exists() and (before := read_record(file)) is not None and before.is_measured:
            print(f"{file} holds what a GPU has given, and is left as it is", file=sys.stderr)
            return
    for name in options.jobs.split(","):
        config, _ = config_of(JOBS[name], options.toy)
        measures = gpu is not None or options.toy
        of_job = compare(name, strategies, options) if measures else unmeasured(name, strategies)
        comparisons += of_job
        figures.append(figure_of(name, of_job, units_of_step(config), options.toy))
    settings = {name: getattr(options, name) for name in ("toy", "rounds", "steps", "warmup")}
    settings |= {name: [*JOBS[name].overrides] for name in options.jobs.split(",")}
    title = "Throughput on one GPU" + (", at a toy size on the CPU" if options.toy else "")
    record = Record("gpu_throughput", title, ABOUT, settings, facts, comparisons, figures)
    write_record(record, options, name="cuda")


if __name__ == "__main__":
    main()
