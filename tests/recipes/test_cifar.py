"""The CIFAR recipe on pictures of CIFAR's size: augmentation, mirroring and stem, however they are shared out."""

import json

import numpy as np
import pytest

from jobs import train_in_job
from largebatch.storage.files import read_json_lines
from paths import CIFAR
from pictures import png, write_parquet
from small_data import of_file

pytestmark = pytest.mark.slow

STEPS = 4
# On processors with AVX2 and no more, oneDNN writes past its memory in the backward pass of convolutions of 4 channels.
SMALL = (
    "--model.embedding_size=8",
    "--model.hidden_sizes=[8, 16]",
    "--model.depths=[1, 1]",
    "--batch.global_batch_size=32",
    "--batch.micro_batch_size=8",
    '--train.duration={"epochs": 2}',
    f"--train.stop_after_steps={STEPS}",
    "--evaluation.every=null",
    "--checkpoint.every=null",
    "--learning_rate.warmup=null",
    "--logging.every=1",
    "--logging.trackers=[]",
    '--learning_rate.decay={"name": "constant"}',
    # Of noise there is nothing to learn: gradients are so small that fp32's rounding shows.
    "--precision=fp64",
)


@pytest.fixture
def words(tmp_path):
    """96 noisy pictures, so that three steps are an epoch, and the fourth sees other crops."""
    random = np.random.default_rng(0)
    pictures = [png(random.integers(0, 256, size=(32, 32, 3), dtype=np.uint8)) for _ in range(96)]
    file = tmp_path / "cifar.parquet"
    write_parquet(file, pictures, [number % 10 for number in range(96)])
    data = [f"--data.{name}={json.dumps(value)}" for name, value in of_file(file, "parquet", 96).items()]
    columns = ("--data.eval_split=validation", "--data.image_column=image")
    return (*SMALL, *data, *columns)


def test_the_same_training_wherever_pictures_are_prepared(words, tmp_path):
    losses = {}
    for strategy, num_workers in (("single", 0), ("ddp", 1)):
        run_dir = tmp_path / strategy
        train_in_job(CIFAR, run_dir, *words, f"--data.num_workers={num_workers}", strategy=strategy)
        lines = read_json_lines(run_dir / "metrics.jsonl") + read_json_lines(run_dir / "evaluations.jsonl")
        losses[strategy] = [line["loss"] for line in lines]
    assert len(losses["single"]) == STEPS + 1
    assert losses["ddp"] == pytest.approx(losses["single"], rel=1e-5)
