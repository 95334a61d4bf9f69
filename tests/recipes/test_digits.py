"""The embedded recipes learn: ViT, and ResNet at eight times the batch it was tuned at, by the linear rule with warmup.

At the batch it was tuned at, `.ci/run` trains it by `make train`; `bench/accuracy.py` trains ViT to its figure.
"""

import json
from pathlib import Path

import pytest

from jobs import run_job, train
from paths import DIGITS, VIT_DIGITS

pytestmark = pytest.mark.slow


def accuracy_of(recipe: Path, run_dir: Path, *words: str) -> float:
    train(recipe, *words, run_dir=run_dir)
    return json.loads((run_dir / "summary.json").read_text())["evaluation"]["accuracy"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "at_least"),
    [
        (DIGITS, ["--batch.global_batch_size=512"], 0.96),
        (VIT_DIGITS, ['--train.duration={"epochs": 12}'], 0.70),
    ],
)
def test_accuracy(recipe, overrides, at_least, tmp_path):
    accuracies = run_job(accuracy_of, recipe, tmp_path / "run", *overrides)
    assert accuracies[0] >= at_least
