"""Samples that weigh differently, down to nothing."""

import json

import pytest

from jobs import failure_of, run_job
from paths import PYDOC
from test_strategies import assert_same, recorded

pytestmark = pytest.mark.slow

SMALL = ("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--learning_rate.warmup=null")
BATCH = '--batch={"global_batch_size": 8, "micro_batch_size": 2}'


def words_for(documents: list[str], tmp_path) -> tuple[str, ...]:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    data = {
        "source": "datasets",
        "path": "json",
        "data_files": {"train": str(file), "eval": str(file)},
        "tokenizer": "bytes",
        "samples": "documents",
        "block_size": 16,
        "num_train_samples": len(documents),
        "num_eval_samples": len(documents),
    }
    return (*SMALL, BATCH, f"--data={json.dumps(data)}", '--train.duration={"steps": 20}')


def test_processes_without_a_target(tmp_path):
    """In most steps some process has no target at all."""
    words = words_for(["" if number % 2 else "abcdefgh"[: 1 + number % 7] for number in range(64)], tmp_path)
    alone, shared = (
        run_job(recorded, PYDOC, tmp_path / strategy, *words, strategy=strategy, world_size=world_size)[0]
        for strategy, world_size in (("single", 1), ("zero3", 4))
    )
    assert_same(shared, alone)


def test_a_step_without_any_target_is_refused(tmp_path):
    """After the first, on every process alike: there is nothing to take a mean over."""
    words = words_for([""] * 64, tmp_path)
    report = failure_of(recorded, PYDOC, tmp_path / "run", *words)
    assert "error: no sample of step 1 has a target, so there is nothing to average the loss over" in report
    assert "exit code 1" in report
