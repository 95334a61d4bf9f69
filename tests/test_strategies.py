"""The same optimisation under every strategy and number of processes, against a plain PyTorch loop in one process."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jobs import run_job, train
from paths import DIGITS, PYDOC, STRATEGIES
from reference import reference_digits, reference_pydoc

STEPS = 20
SMALL_GPT = ("--model.num_layers=2", "--model.hidden_size=32", "--model.num_heads=2", "--data.block_size=32")
# The overrides of each recipe, its independent reference, and the tolerance of weights against that reference.
RECIPES = {"sgd": (DIGITS, (), reference_digits), "adamw": (PYDOC, SMALL_GPT, reference_pydoc)}
TOLERANCE = 1e-5


def recorded(recipe: Path, run_dir: Path, *overrides: str) -> dict:
    """Train, and return the metrics, the weights after each step (on rank 0) and the evaluations."""
    from largebatch.run import Run

    weights = []
    update = Run._update

    def update_and_record(run, *arguments):
        update(run, *arguments)
        state = run.backend.full_state_dict()
        weights.append({name: tensor.numpy(force=True).copy() for name, tensor in state.items()})

    Run._update = update_and_record
    words = (f"--train.stop_after_steps={STEPS}", "--logging.every=1", "--logging.trackers=[]", *overrides)
    train(recipe, *words, run_dir=run_dir)
    return {
        "metrics": [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()],
        "evaluations": [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()],
        "weights": weights,
    }


@cache
def reference(name: str) -> dict:
    recipe, overrides, train_plainly = RECIPES[name]
    (result,) = run_job(train_plainly, recipe, overrides, STEPS, strategy="single", world_size=1)
    return result


def assert_same(result: dict, expected: dict) -> None:
    """Loss, learning rate and gradient norm of each step, and each tensor of weights after it, to a relative 1e-5."""
    assert len(result["metrics"]) == len(expected["metrics"]) == STEPS
    for mine, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert mine["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
    for mine, theirs in zip(result["weights"], expected["weights"], strict=True):
        for name, tensor in theirs.items():
            difference = np.linalg.norm(mine[name] - tensor) / max(np.linalg.norm(tensor), 1e-8)
            assert difference <= TOLERANCE, (name, difference)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes(name, strategy, tmp_path):
    recipe, overrides, _ = RECIPES[name]
    result = run_job(recorded, recipe, tmp_path / "run", *overrides, strategy=strategy)[0]
    assert_same(result, reference(name))


@pytest.mark.parametrize(
    ("strategy", "world_size", "micro_batch_size"),
    [
        ("single", 1, 32),
        ("single", 1, 4),
        ("ddp", 4, 8),
        ("fsdp", 4, 4),
        ("zero1", 4, 4),
        ("zero2", 1, 8),
        ("zero3", 4, 4),
    ],
)
def test_other_factorisations(strategy, world_size, micro_batch_size, tmp_path):
    micro = f"--batch.micro_batch_size={micro_batch_size}"
    words = (*SMALL_GPT, micro)
    result = run_job(recorded, PYDOC, tmp_path / "run", *words, strategy=strategy, world_size=world_size)[0]
    assert_same(result, reference("adamw"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_evaluation_counts_each_sample_once(strategy, tmp_path):
    """360 digits in micro-batches of 16 leave a last one of 8, and an odd number of them; BatchNorm's running
    statistics must be the same, however many micro-batches each process had."""
    alone = run_job(recorded, DIGITS, tmp_path / "alone", strategy="single", world_size=1)[0]["evaluations"]
    shared = run_job(recorded, DIGITS, tmp_path / "shared", strategy=strategy)[0]["evaluations"]
    assert [line["step"] for line in shared] == [STEPS]
    assert shared[0]["loss"] == pytest.approx(alone[0]["loss"], rel=TOLERANCE)
    assert shared[0]["accuracy"] == pytest.approx(alone[0]["accuracy"], abs=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_keeps_weights_and_their_reduction_in_fp32(strategy, tmp_path):
    """Matrix products round to 8 bits, so losses agree to some 1e-3 only; the start checks weights and reduction."""
    words = (*SMALL_GPT, "--precision=bf16")
    result = run_job(recorded, PYDOC, tmp_path / "run", *words, strategy=strategy)[0]
    for mine, theirs in zip(result["metrics"], reference("adamw")["metrics"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
    assert {tensor.dtype.name for tensor in result["weights"][-1].values()} == {"float32"}
    # It did compute in bf16.
    assert any(
        mine["loss"] != pytest.approx(theirs["loss"], rel=1e-6)
        for mine, theirs in zip(result["metrics"], reference("adamw")["metrics"], strict=True)
    )


def test_dropout_is_the_same_wherever_a_micro_batch_is_computed(tmp_path):
    words = (*SMALL_GPT, "--model.dropout=0.2", "--batch.micro_batch_size=4")
    alone = run_job(recorded, PYDOC, tmp_path / "alone", *words, strategy="single", world_size=1)[0]
    for strategy, world_size in (("ddp", 2), ("zero2", 2), ("fsdp", 4)):
        run_dir = tmp_path / strategy
        shared = run_job(recorded, PYDOC, run_dir, *words, strategy=strategy, world_size=world_size)[0]
        assert_same(shared, alone)
    assert alone["metrics"][0]["loss"] != pytest.approx(reference("adamw")["metrics"][0]["loss"], rel=1e-6)
