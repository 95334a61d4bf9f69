"""The embedded recipes learn: ViT, and ResNet at eight times the batch it was tuned at, by the linear rule with warmup.

At the batch it was tuned at, `.ci/run` trains it by `make train`.
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


@pytest.mark.parametrize(("recipe", "global_batch_size", "at_least"), [(DIGITS, 512, 0.96), (VIT_DIGITS, 64, 0.93)])
def test_accuracy(recipe, global_batch_size, at_least, tmp_path):
    words = f"--batch.global_batch_size={global_batch_size}"
    accuracies = run_job(accuracy_of, recipe, tmp_path / "run", words)
    assert accuracies[0] >= at_least
