"""The embedded recipe learns: at the batch it was tuned at, and eight times larger by the linear rule with warmup."""

import json
from pathlib import Path

import pytest

from jobs import run_job, train
from paths import DIGITS


def accuracy_of(run_dir: Path, *words: str) -> float:
    train(DIGITS, *words, run_dir=run_dir)
    return json.loads((run_dir / "summary.json").read_text())["evaluation"]["accuracy"]


@pytest.mark.parametrize(("global_batch_size", "at_least"), [(64, 0.97), (512, 0.96)])
def test_accuracy(global_batch_size, at_least, tmp_path):
    words = f"--batch.global_batch_size={global_batch_size}"
    accuracies = run_job(accuracy_of, tmp_path / "run", words)
    assert accuracies[0] >= at_least
