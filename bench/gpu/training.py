"""Trainings to their end, which share the GPU: CIFAR-10 at three batch sizes, and Tiny Shakespeare at two."""

import time
from functools import partial
from pathlib import Path

from gpu.jobs import Job
from gpu.machine import Gpus
from gpu.rows import Deadline, Launcher, NotMeasured, Part, Result, Row
from largebatch.errors import RunStopped
from largebatch.storage.run_folder import RunFolder
from largebatch.tools.local_jobs.jobs import JobFailed
from largebatch.tools.local_jobs.training import train
from record import ROOT, Figure

TITLE = "Trainings on one GPU"
ABOUT = """`resnet_cifar10` for 30 epochs in bf16, with cosine decay and a linearly scaled rate, and
`gpt_shakespeare_10m` with a rate scaled by the square root; `bench/results/gpu_training` has an earlier reading of
both. They share the GPU, so their times say nothing."""

SEEDS = 3
MICRO_BATCH_SIZE = 128
# How much smaller the batches of a rehearsal are.
SMALLER = 64
# How long before its row must end a training stops and saves, in seconds.
MARGIN = 30
DATA = ROOT / "data"
COMMON = (
    "--data.num_workers=1",
    "--checkpoint.every=null",
    "--logging.trackers=[]",
    f"--faults.time_limit_margin_seconds={MARGIN}",
)
REHEARSED = ('--train.duration={"steps": 2}', "--learning_rate.warmup=null")
CIFAR10 = Job(
    "CIFAR-10",
    "image_classification/resnet_cifar10.json",
    (
        "--precision=bf16",
        '--learning_rate.decay={"name": "cosine"}',
        '--train.duration={"epochs": 30}',
        "--data.path=parquet",
        f'--data.data_files={{"train": "{DATA}/cifar10/train.parquet", "eval": "{DATA}/cifar10/test.parquet"}}',
        "--data.eval_split=validation",
        "--data.image_column=image",
    ),
    (
        "--data.eval_split=validation[:16]",
        "--data.num_eval_samples=16",
        "--model.hidden_sizes=[8]",
        "--model.depths=[1]",
        "--model.embedding_size=8",
    ),
    "accuracy",
)
SHAKESPEARE = Job(
    "Tiny Shakespeare",
    "causal_lm/gpt_shakespeare_10m.json",
    (f'--data.data_files={{"train": "{DATA}/shakespeare/input.txt", "eval": "{DATA}/shakespeare/input.txt"}}',),
    ("--model.hidden_size=32", "--model.num_layers=2", "--model.num_heads=2"),
    "loss",
)
CASES = (
    (CIFAR10, 128, "ddp"),
    (CIFAR10, 1024, "zero1"),
    (CIFAR10, 4096, "ddp"),
    (SHAKESPEARE, 64, "ddp"),
    (SHAKESPEARE, 512, "fsdp"),
)


def words_of(job: Job, batch: int, seed: int, is_small: bool) -> list[str]:
    """The overrides of a run."""
    size = batch // SMALLER if is_small else batch
    words = [
        f"--seed={seed}",
        f"--batch.global_batch_size={size}",
        f"--batch.micro_batch_size={min(size, MICRO_BATCH_SIZE)}",
        *COMMON,
        *job.overrides,
    ]
    return [*words, *job.small, *REHEARSED] if is_small else words


def row_of(job: Job, batch: int, strategy: str, seed: int, launcher: Launcher, folder: Path, small: bool) -> Row:
    """A training, or what an earlier call has left of it."""
    name = f"{job.title}, {batch}, {strategy}, seed {seed}"
    run = RunFolder(folder / name.replace(", ", "-").replace(" ", "_"))
    training = partial(train, job.path, *words_of(job, batch, seed, small), run_dir=run.path)

    def measure_it(deadline: Deadline) -> list[Result]:
        ends = {"LARGEBATCH_JOB_END_TIME": str(int(time.time() + deadline.seconds_left))}
        try:
            launcher.run(deadline, strategy, training, environment=ends)
        except JobFailed as failed:
            if failed.exit_code != RunStopped.exit_code:
                raise
            step = run.checkpoint_step()
            raise NotMeasured(f"its time was up after step {step}; the same command goes on") from failed
        values = [each[job.unit] for each in run.evaluations()]
        results: list[Result] = [Figure(f"{name}: {job.unit} at the end", job.unit, values[-1:])]
        if job.unit == "loss":
            results.append(Figure(f"{name}: lowest loss", job.unit, [min(values)]))
        return results

    return Row(name, measure_it)


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows, at once on a GPU; the first seed of everything first."""
    is_small = gpus.count == 0
    launcher = Launcher(1, ("ddp", "fsdp", "zero1"))
    part.measure(
        [row_of(*case, seed, launcher, part.folder / "runs", is_small) for seed in range(SEEDS) for case in CASES],
        at_once=2 if is_small else SEEDS * len(CASES),
    )
