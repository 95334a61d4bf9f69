"""ResNet learns at eight times the batch it was tuned at, by the linear rule with warmup.

At the batch it was tuned at, `.ci/run` trains it by `make train`. `bench/results/accuracy` has three seeds, and ViT.
"""

import json
from itertools import product

import pytest
from PIL import Image
from transformers import AutoConfig

from jobs import train_in_job
from largebatch.storage.files import read_json_lines
from paths import DIGITS

pytestmark = pytest.mark.slow


FIGURE = {"metric": "accuracy", "value": 0.8, "spread": 0.05, "seeds": 3, "after": {"epochs": 12}, "source": "a paper"}


def test_accuracy_and_how_it_compares_with_a_figure(run_dir):
    words = ["--batch.global_batch_size=512", f"--expected={json.dumps(FIGURE)}"]
    train_in_job(DIGITS, run_dir, *words)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["evaluation"]["accuracy"] >= 0.96
    lines = read_json_lines(run_dir / "evaluations.jsonl")
    # tests/plan has what follows from it.
    assert summary["expected"]["found"] == next(line["accuracy"] for line in lines if line["epoch"] >= 12)


def test_the_model_has_the_names_of_folders(tmp_path):
    """A third class has no folder."""
    for split, name in product(("train", "val"), ("night", "day")):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / split / name / "0.png")
    gray = [0.5] * 3
    shape = {"image_size": 32, "num_classes": 3, "train_augmentation": "none", "mean": gray, "std": gray}
    data = {"source": "datasets", "path": str(tmp_path), "num_train_samples": 2, "num_eval_samples": 2} | shape
    batch = ("--batch.global_batch_size=2", "--batch.micro_batch_size=2", '--train.duration={"steps": 1}')
    words = (f"--data={json.dumps(data)}", *batch, "--learning_rate.warmup=null", "--evaluation.every=null")
    train_in_job(DIGITS, tmp_path / "run", *words, strategy="single")
    config = AutoConfig.from_pretrained(tmp_path / "run/model")
    assert config.id2label == {0: "day", 1: "night", 2: "LABEL_2"}
    assert config.label2id == {name: number for number, name in config.id2label.items()}
