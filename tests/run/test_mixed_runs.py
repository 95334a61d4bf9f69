"""Runs on a mixture: they resume in the middle of a phase, and evaluate each source."""

import json

import pytest

from largebatch.storage.files import read_json_lines
from paths import ROOT
from resuming import Interruption, assert_close_weights, run_interrupted
from tasks import SMALL

FILES = {"long": ("LICENSE", 90, 12), "short": ("SECURITY.md", 30, 7)}
DATA = {
    "source": "datasets",
    "path": "text",
    "tokenizer": "bytes",
    "samples": "documents",
    "block_size": 16,
    "num_train_samples": 120,
    "num_eval_samples": 19,
    "sources": [
        {
            "name": name,
            "weight": 0.5,
            "data_files": {"train": str(ROOT / file), "eval": str(ROOT / file)},
            "num_train_samples": train,
            "num_eval_samples": evaluation,
        }
        for name, (file, train, evaluation) in FILES.items()
    ],
    "weight_phases": [{"from": {"steps": 6}, "weights": {"long": 1, "short": 3}}],
}
WORDS = (
    f"--data={json.dumps(DATA)}",
    *SMALL[:3],
    "--model.dropout=0.1",
    "--batch.global_batch_size=24",
    "--batch.micro_batch_size=3",
    '--train.duration={"steps": 12}',
    "--learning_rate.warmup=null",
    '--evaluation.every={"steps": 6}',
    "--logging.every=1",
    "--logging.trackers=[]",
)


@pytest.mark.slow
def test_a_mixture_resumes_in_the_middle_of_a_phase_under_another_strategy(tmp_path):
    assert run_interrupted(tmp_path / "whole", WORDS, strategy="single") is None
    stopped = run_interrupted(tmp_path / "parts", WORDS, Interruption("signal", 0, 8))
    assert "exit code 75" in stopped
    assert run_interrupted(tmp_path / "parts", WORDS, strategy="fsdp", world_size=4) is None
    assert_close_weights(tmp_path / "parts", tmp_path / "whole")
    whole, parts = (read_json_lines(tmp_path / f"{name}/metrics.jsonl") for name in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert "epoch" not in one

    (at_six, at_end) = read_json_lines(tmp_path / "whole/evaluations.jsonl")
    for line in (at_six, at_end):
        assert {"loss", "loss/long", "loss/short", "perplexity"} <= line.keys()
        assert line["loss/long"] != line["loss/short"]
    # The whole mean counts each target once: those of a document, up to 16.
    weights = {}
    for name, (file, _, number) in FILES.items():
        lines = (ROOT / file).read_text().splitlines()[:number]
        weights[name] = sum(min(len(text.encode()), 16) for text in lines)
    mean = sum(weights[name] * at_end[f"loss/{name}"] for name in FILES) / sum(weights.values())
    assert at_end["loss"] == pytest.approx(mean, rel=1e-5)
