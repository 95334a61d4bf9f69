"""Trainings to their end, which share the GPU: CIFAR-10 at three batch sizes, and Tiny Shakespeare at two."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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

DATA = ROOT / "data"
# How long before its row must end a training stops and saves, in seconds.
MARGIN = 30


@dataclass(frozen=True)
class Training:
    """A recipe at several batch sizes.

    Args:
        title: For people.
        recipe: Relative to recipes/.
        files: Of training and evaluation, relative to `DATA`.
        batches: The strategy of each.
        seeds: How many.
        micro_batch_size: At most.
        metric: Of the evaluations.
        overrides: Of the recipe.
        small: Further ones that make it small enough for a CPU, on which batches are 64 times smaller.
    """

    title: str
    recipe: str
    files: tuple[str, str]
    batches: dict[int, str]
    seeds: int
    micro_batch_size: int
    metric: str
    overrides: tuple[str, ...]
    small: tuple[str, ...]

    def words(self, batch: int, seed: int, is_small: bool) -> list[str]:
        """The overrides of a run."""
        size = batch // 64 if is_small else batch
        files = dict(zip(("train", "eval"), (str(DATA / file) for file in self.files), strict=True))
        words = [
            f"--seed={seed}",
            f"--batch.global_batch_size={size}",
            f"--batch.micro_batch_size={min(size, self.micro_batch_size)}",
            f"--data.data_files={json.dumps(files)}",
            "--data.num_workers=1",
            "--checkpoint.every=null",
            "--logging.trackers=[]",
            f"--faults.time_limit_margin_seconds={MARGIN}",
            *self.overrides,
        ]
        shortened = ('--train.duration={"steps": 2}', "--learning_rate.warmup=null")
        return [*words, *self.small, *shortened] if is_small else words


TRAININGS = (
    Training(
        "CIFAR-10",
        "image_classification/resnet_cifar10.json",
        ("cifar10/train.parquet", "cifar10/test.parquet"),
        {128: "ddp", 1024: "zero1", 4096: "ddp"},
        3,
        128,
        "accuracy",
        (
            "--precision=bf16",
            '--learning_rate.decay={"name": "cosine"}',
            '--train.duration={"epochs": 30}',
            "--data.path=parquet",
            "--data.image_column=image",
            "--data.eval_split=validation",
        ),
        (
            "--model.hidden_sizes=[8]",
            "--model.depths=[1]",
            "--model.embedding_size=8",
            "--data.eval_split=validation[:16]",
            "--data.num_eval_samples=16",
        ),
    ),
    Training(
        "Tiny Shakespeare",
        "causal_lm/gpt_shakespeare_10m.json",
        ("shakespeare/input.txt", "shakespeare/input.txt"),
        {64: "ddp", 512: "fsdp"},
        2,
        256,
        "loss",
        (),
        ("--model.hidden_size=32", "--model.num_layers=2", "--model.num_heads=2"),
    ),
)


def result(
    training: Training, batch: int, seed: int, launcher: Launcher, folder: Path, is_small: bool, deadline: Deadline
) -> list[Result]:
    """One row: a training, or what an earlier call has left of it."""
    for file in training.files:
        if not (DATA / file).is_file():
            raise NotMeasured(f"data/{file} is missing")
    name = name_of(training, batch, seed)
    run = RunFolder(folder / name.replace(", ", "-").replace(" ", "_"))
    words = training.words(batch, seed, is_small)
    ends = {"LARGEBATCH_JOB_END_TIME": str(int(time.time() + deadline.seconds_left))}
    recipe = ROOT / "recipes" / training.recipe
    job = partial(train, recipe, *words, run_dir=run.path)
    try:
        launcher.run(deadline, training.batches[batch], job, environment=ends)
    except JobFailed as failed:
        if failed.exit_code != RunStopped.exit_code:
            raise
        raise NotMeasured(f"its time was up after step {run.checkpoint_step()}; the same command goes on") from failed
    values = [each[training.metric] for each in run.evaluations()]
    results: list[Result] = [Figure(f"{name}: {training.metric} at the end", training.metric, values[-1:])]
    if training.metric == "loss":
        results.append(Figure(f"{name}: lowest loss", "loss", [min(values)]))
    return results


def name_of(training: Training, batch: int, seed: int) -> str:
    """A run for people."""
    return f"{training.title}, {batch}, {training.batches[batch]}, seed {seed}"


def rows(folder: Path, is_small: bool) -> Iterator[Row]:
    """The first seed of everything, then the others."""
    launcher = Launcher(1, ("ddp", "fsdp", "zero1"))
    for seed in range(max(training.seeds for training in TRAININGS)):
        for training in TRAININGS:
            for batch in training.batches if seed < training.seeds else ():
                measure_it = partial(result, training, batch, seed, launcher, folder, is_small)
                yield Row(name_of(training, batch, seed), measure_it)


def measure(part: Part, gpus: Gpus) -> None:
    """Measure all rows, at once on a GPU."""
    part.measure(rows(part.folder / "runs", gpus.count == 0), at_once=2 if gpus.count == 0 else 16)
