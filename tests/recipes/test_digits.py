"""ResNet learns at eight times the batch it was tuned at, by the linear rule with warmup.

At the batch it was tuned at, `.ci/run` trains it by `make train`. `bench/results/accuracy` has three seeds, and ViT.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification

import tasks
from jobs import train_in_job
from largebatch.config import load_config
from largebatch.data.images import normalize_pixels
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
    colors = {"night": (10, 10, 40), "day": (200, 200, 255)}
    for split in ("train", "val"):
        for name, color in colors.items():
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (32, 32), color).save(tmp_path / split / name / f"{number}.png")
    data = {
        "source": "datasets",
        "path": str(tmp_path),
        "image_size": 32,
        "num_classes": 3,
        "train_augmentation": "none",
    }
    data |= {"num_train_samples": 16, "num_eval_samples": 16, "mean": [0.5] * 3, "std": [0.5] * 3}
    words = [f"--data={json.dumps(data)}", "--batch.global_batch_size=16", '--train.duration={"steps": 30}']
    train_in_job(DIGITS, tmp_path / "run", *words, "--learning_rate.warmup=null", strategy="single")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run/model").eval()
    config = load_config(DIGITS, words)
    _, evaluation = tasks.sources("image_classification")(config)
    with torch.no_grad():
        pixels = evaluation.fetch(np.arange(16), None)["pixel_values"]
        best = model(normalize_pixels(pixels, config.data)).logits.argmax(dim=1).tolist()
    folders = ["day"] * 8 + ["night"] * 8
    accuracy = np.mean([model.config.id2label[label] == name for label, name in zip(best, folders, strict=True)])
    assert accuracy == read_json_lines(tmp_path / "run/evaluations.jsonl")[-1]["accuracy"] > 0.5
