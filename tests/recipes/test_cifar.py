"""The CIFAR recipe on pictures of CIFAR's size: augmentation, mirroring and stem, however they are shared out."""

import json
from pathlib import Path

import numpy as np
import pytest

from jobs import run_job
from paths import CIFAR
from pictures import png, write_parquet
from small_data import of_file
from test_strategies import assert_same, recorded

pytestmark = pytest.mark.slow

STEPS = 4
# On processors with AVX2 and no more, oneDNN writes past its memory in the backward pass of convolutions of 4 channels.
SMALL = ("--model.embedding_size=8", "--model.hidden_sizes=[8, 16]", "--model.depths=[1, 1]")
SHORT = (
    "--batch.global_batch_size=32",
    "--batch.micro_batch_size=8",
    '--train.duration={"epochs": 2}',
    f"--train.stop_after_steps={STEPS}",
    "--evaluation.every=null",
    "--checkpoint.every=null",
    "--learning_rate.warmup=null",
    '--learning_rate.decay={"name": "constant"}',
)
# Of noise there is nothing to learn: gradients are so small that fp32's rounding shows.
EXACT = "--precision=fp64"


@pytest.fixture
def words(tmp_path) -> tuple[str, ...]:
    """96 noisy pictures, so that three steps are an epoch, and the fourth sees other crops."""
    random = np.random.default_rng(0)
    pictures = [png(random.integers(0, 256, size=(32, 32, 3), dtype=np.uint8)) for _ in range(96)]
    file = tmp_path / "cifar.parquet"
    write_parquet(file, pictures, [number % 10 for number in range(96)])
    data = [f"--data.{name}={json.dumps(value)}" for name, value in of_file(file, "parquet", 96).items()]
    columns = ("--data.eval_split=validation", "--data.image_column=image")
    return (*SMALL, *SHORT, EXACT, *data, *columns)


def trained(words: tuple[str, ...], run_dir: Path, strategy: str, world_size: int = 2) -> dict:
    """What rank 0 has recorded; running statistics are common to the processes in evaluations only."""
    result = run_job(recorded, CIFAR, run_dir, *words, strategy=strategy, world_size=world_size)[0]
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    for weights in result["weights"]:
        for name in [*weights]:
            if name.endswith(statistics):
                del weights[name]
    return result


def test_the_same_training_wherever_pictures_are_prepared(words, tmp_path):
    alone = trained((*words, "--data.num_workers=0"), tmp_path / "alone", "single", 1)
    shared = trained((*words, "--data.num_workers=1"), tmp_path / "shared", "ddp")
    assert_same(shared, alone, STEPS)
    assert shared["evaluations"][0]["loss"] == pytest.approx(alone["evaluations"][0]["loss"], rel=1e-5)
