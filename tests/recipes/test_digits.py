"""ResNet learns at eight times the batch it was tuned at, by the linear rule with warmup.

At the batch it was tuned at, `.ci/run` trains it by `make train`. `bench/results/accuracy` has three seeds, and ViT.
"""

import json
from functools import partial

import pytest

from jobs import run_job, train
from largebatch.storage.files import read_json_lines
from paths import DIGITS

pytestmark = pytest.mark.slow


FIGURE = {"metric": "accuracy", "value": 0.8, "spread": 0.05, "seeds": 3, "after": {"epochs": 12}, "source": "a paper"}


def test_accuracy_and_how_it_compares_with_a_figure(tmp_path):
    words = ["--batch.global_batch_size=512", f"--expected={json.dumps(FIGURE)}"]
    run_job(partial(train, run_dir=tmp_path / "run"), DIGITS, *words)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["evaluation"]["accuracy"] >= 0.96
    lines = read_json_lines(tmp_path / "run/evaluations.jsonl")
    found = next(line["accuracy"] for line in lines if line["epoch"] >= 12)
    # 0.8 - 4.303 x 0.05 x sqrt(4 / 3), and as much above.
    assert summary["expected"]["low"] == pytest.approx(0.5516, abs=1e-3)
    assert summary["expected"]["found"] == found
    assert summary["expected"]["verdict"] == ("inside" if 0.5516 <= found <= 1.0484 else "outside")
