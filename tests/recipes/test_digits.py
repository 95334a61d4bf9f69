"""ResNet learns at eight times the batch it was tuned at, by the linear rule with warmup.

At the batch it was tuned at, `.ci/run` trains it by `make train`. `bench/results/accuracy` has three seeds, and ViT.
"""

import json

import pytest

from jobs import train_in_job
from largebatch.storage.files import read_json_lines
from paths import DIGITS

pytestmark = pytest.mark.slow


FIGURE = {"metric": "accuracy", "value": 0.8, "spread": 0.05, "seeds": 3, "after": {"epochs": 12}, "source": "a paper"}


def test_accuracy_and_how_it_compares_with_a_figure(tmp_path):
    words = ["--batch.global_batch_size=512", f"--expected={json.dumps(FIGURE)}"]
    train_in_job(DIGITS, tmp_path / "run", *words)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["evaluation"]["accuracy"] >= 0.96
    lines = read_json_lines(tmp_path / "run/evaluations.jsonl")
    # tests/plan has what follows from it.
    assert summary["expected"]["found"] == next(line["accuracy"] for line in lines if line["epoch"] >= 12)
