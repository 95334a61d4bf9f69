"""The recipes that are measured on a GPU, with the sizes of a benchmark, on generated samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.compiled import train_compiled
from largebatch.config import load_config
from largebatch.data.images import TensorImages
from largebatch.data.text import TokenBlocks
from largebatch.data.token_stream import TokenStream
from largebatch.run import Run, Step
from largebatch.task_folders import import_from
from record import ROOT

NUM_SAMPLES = 4096


@dataclass(frozen=True)
class Job:
    """A recipe, made the job that is measured.

    Args:
        title: For people.
        recipe: Relative to recipes/.
        overrides: Overrides of the recipe.
        small: Further ones that make it small enough for a CPU.
        unit: The unit that is counted.
        at_least: Units per second that are aimed at on one H200, if any are. Of BERT-Large and CLIP, twice what
            NVIDIA's examples and open_clip reach on an A100.
    """

    title: str
    recipe: str
    overrides: tuple[str, ...]
    small: tuple[str, ...]
    unit: str
    at_least: float | None = None

    @property
    def path(self) -> Path:
        """The path of the recipe."""
        return ROOT / "recipes" / self.recipe

    @property
    def has_pairs(self) -> bool:
        """Whether samples are images with their texts."""
        return self.recipe.startswith("two_towers")


SMALL = ("--model.hidden_size=32", "--model.num_layers=2", "--model.num_heads=2")
SMALL_BERT = (*SMALL, "--model.dropout=0")
SMALL_BATCH = ("--batch.global_batch_size=4", "--batch.micro_batch_size=2")
JOBS = {
    "gpt2_124m": Job(
        "GPT-2 124M",
        "causal_lm/gpt2_124m.json",
        ("--batch.global_batch_size=128", "--batch.micro_batch_size=32"),
        (*SMALL, "--model.vocab_size=256"),
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
            *SMALL,
            "--model.intermediate_size=64",
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
    "vit_s16": Job(
        "ViT-S/16",
        "image_classification/vit_s16_imagenet.json",
        ("--loss.mixup_alpha=null", "--batch.global_batch_size=512", "--batch.micro_batch_size=256"),
        (*SMALL, "--data.image_size=32"),
        "images",
        7_700,
    ),
    "bert_large_128": Job(
        "BERT-Large, 128 tokens",
        "masked_lm/bert_large_64k_128.json",
        ("--batch.global_batch_size=512", "--batch.micro_batch_size=256"),
        SMALL_BERT,
        "sequences",
        1_160,
    ),
    "bert_large_512": Job(
        "BERT-Large, 512 tokens",
        "masked_lm/bert_large_32k_512.json",
        ("--model.initial_weights=null", "--batch.global_batch_size=128", "--batch.micro_batch_size=64"),
        SMALL_BERT,
        "sequences",
        420,
    ),
    "clip_b32": Job(
        "CLIP ViT-B/32",
        "two_towers/clip_b32_32k.json",
        ("--batch.global_batch_size=512", "--batch.micro_batch_size=512", "--model.end_of_text=0"),
        (
            '--model.image={"hidden_size": 32, "num_layers": 1, "num_heads": 2}',
            '--model.text={"hidden_size": 32, "num_layers": 1, "num_heads": 2}',
            "--data.image_size=32",
            "--model.vocab_size=256",
        ),
        "images",
        1_580,
    ),
}


def config_of(job: Job, is_small: bool) -> tuple[Any, list[str]]:
    """The recipe's config for the job, and the overrides that make it."""
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
    # Samples are generated: nothing is asked of a hub.
    has_blocks = job.unit != "images"
    words += ["--data.tokenizer=bytes"] if has_blocks or job.has_pairs else []
    words += ["--data.config_name=null"] if has_blocks else []
    words += [] if job.has_pairs else [f"--data.path={ROOT}"]
    if is_small:
        words += [*job.small, *SMALL_BATCH, "--data.num_workers=0"]
        words += ["--data.block_size=16"] if has_blocks else []
    else:
        words.append("--compute.compile=on")
    return load_config(job.path, words), words


def units_of_step(job: Job, config: Any) -> int:
    """Tokens, sequences or images of an optimizer step."""
    return config.batch.global_batch_size * (config.data.block_size if job.unit == "tokens" else 1)


def generated_sources(job: Job, config: Any, _preparation: object) -> tuple[Any, ...]:
    """Training and evaluation samples like the recipe's, of random numbers."""
    random = np.random.default_rng(0)
    task = import_from(job.path.parent, "data")
    sizes = (config.data.num_train_samples, config.data.num_eval_samples)
    if job.unit != "images":
        block = config.data.block_size
        vocabulary = np.arange(1, config.model.vocab_size)
        tokens = TokenStream.in_memory(random.choice(vocabulary.astype(np.uint16), max(sizes) * block + 1))
        blocks = tuple(TokenBlocks(tokens, block, size) for size in sizes)
        if job.unit == "tokens":
            return blocks
        return tuple(
            task.MaskedBlocks(
                **vars(each), num_targets=config.data.tokens_per_sample, mask=0, ordinary=vocabulary, seed=0
            )
            for each in blocks
        )
    side = config.data.image_size
    pixels = torch.from_numpy(random.integers(0, 256, (max(sizes), 3, side, side), dtype=np.uint8))
    labels = torch.from_numpy(random.integers(0, getattr(config.data, "num_classes", 10), max(sizes)))
    build = TensorImages
    if job.has_pairs:
        build = partial(task.DigitPairs, texts=task.Texts(config), seed=0)
    return tuple(build(pixels[:size], labels[:size]) for size in sizes)


class Enough(BaseException):
    """Ends a training of which everything is measured."""


def train_job(job: Job, words: Sequence[str], run_dir: Path, after_update: Callable[[Step], object]) -> None:
    """Train in this process by the recipe's own train.py, on generated samples.

    Args:
        job: What is trained.
        words: Overrides of its recipe.
        run_dir: The run folder.
        after_update: Called with each step after its update.
    """
    update = Run.update

    def followed_update(run: Run[Any], step: Step) -> None:
        update(run, step)
        after_update(step)

    Run.update = followed_update  # type: ignore[method-assign]
    import_from(job.path.parent, "data").sources = partial(generated_sources, job)
    train_compiled(job.path, *words, run_dir=run_dir)
