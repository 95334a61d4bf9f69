"""Rows of `largebatch verify`: what is the same agrees, and what is not, differs."""

import dataclasses
import re

import numpy as np
import pytest

from largebatch.tools.verify import verification
from largebatch.tools.verify.differences import Trained, limits
from largebatch.tools.verify.verification import Combination, Verification
from paths import DIGITS, MAPS, PYDOC, ROOT
from resuming import TINY_MAPS
from tasks import TINY
from verifying import SGD, recipe_with, rows_of, verification_of, verify

LORA = ROOT / "recipes/sft/sft_qwen_7b_lora.json"


@pytest.mark.slow
def test_fp64_differs_by_its_own_rounding_only():
    """Samples of unequal weight, ragged batches and clipping, 10 steps: 1e-12 shows mathematics, not luck.

    A row says that DeepSpeed has none.
    """
    words = (*TINY_MAPS, *SGD, "--data.num_train_samples=130", "--batch.micro_batch_size=4", "--precision=fp64")
    words += ("--optimizer.clip_norm=0.5", '--train.duration={"steps": 40}')
    reference, row, failed = rows_of(MAPS, words, Combination("ddp", 3, 4), Combination("zero2", 2, 4), steps=10)
    assert reference.verdict == "reference"
    assert row.verdict == "agrees", row
    assert 0 < max(row.differences.values()) <= 1e-12
    assert failed.verdict == "failed"
    assert failed.problem.startswith("DeepSpeed ZeRO keeps its master weights in fp32")


def test_a_recipe_without_fp32_is_not_trained_in_it():
    """With frozen weights in bf16, it is refused, which is no error of whoever asks."""
    assert not verification_of(LORA, (), steps=3).agrees_in_fp32(Combination("ddp", 2, 1))


@pytest.mark.slow
def test_batch_norm_is_compared_at_its_own_micro_batch_size():
    """Also while the batch shrinks to one micro-batch."""
    sizes = '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 64}, {"from": {"steps": 3}, "size": 32}]'
    small = ("--data.image_size=8", "--model.hidden_sizes=[8]", "--model.depths=[1]", "--model.embedding_size=8")
    combinations = [Combination("ddp", 2, 16), Combination("ddp", 2, 8)]
    rows = rows_of(DIGITS, (sizes, *small, "--precision=fp64"), *combinations)
    assert [(row.combination.strategy, row.combination.micro_batch_size, row.verdict) for row in rows] == [
        ("single", 16, "reference"),
        ("ddp", 16, "agrees"),
        ("single", 8, "reference"),
        ("ddp", 8, "agrees"),
    ]


@pytest.mark.slow
def test_what_rounding_alone_makes_is_measured(monkeypatch):
    """A ResNet enlarges rounding beyond the usual tolerance; held against itself from weights moved by one rounding."""
    held = verification_of(DIGITS, ("--data.image_size=16",), steps=20)
    _, row = held.rows([Combination("ddp", 2, 16)])
    assert row.verdict == "agrees"
    assert row.differences["parameters"] > 1e-6
    # With the limit that was measured.
    allowed = re.fullmatch(
        r"rounding alone causes such differences; allowed: .*parameters (\d\.\de-\d\d).*", row.problem
    )
    assert row.differences["parameters"] < float(allowed[1]) < 0.1
    monkeypatch.setattr(verification, "MAX_DISTINGUISHABLE", limits(1e-7, "fp32"))
    [row] = held.rows([Combination("ddp", 2, 16)])
    assert row.verdict == "unclear"
    assert row.problem.endswith("too large to tell apart from errors: use fewer --steps, or --precision fp64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import sys; sys.exit(0)", "UserError: the script trained no step"),
        (
            "from largebatch.run import Run; Run.finish = lambda run: None\n{}",
            "the script wrote no weights: end it with",
        ),
    ],
)
def test_a_reference_that_does_not_train(script, problem, tmp_path):
    recipe = recipe_with("", tmp_path)
    file = recipe.with_name("train.py")
    file.write_text(script.replace("{}", file.read_text()))
    [reference] = rows_of(recipe, TINY, Combination("ddp", 2, 4), steps=2)
    assert reference.verdict == "failed"
    assert problem in reference.problem


@pytest.mark.slow
def test_a_failure_is_a_row_that_names_the_process_that_failed_first_and_the_rest_goes_on(tmp_path):
    """The other processes fail because of it, with errors of their own.

    A script may evaluate nothing, and leave by exit.
    """
    bug = """import os
if (os.environ.get("WORLD_SIZE"), os.environ.get("RANK")) == ("2", "1"):
    import time; time.sleep(2); raise ValueError("boom")
from largebatch.run import Run
Run.should_evaluate = False"""
    recipe = recipe_with(bug, tmp_path)
    script = recipe.with_name("train.py")
    script.write_text(script.read_text().replace("    run.finish()\n", "    run.finish()\n    raise SystemExit(0)\n"))
    combinations = [Combination("ddp", 2, 4), Combination("ddp", 3, 4)]
    reference, failed, other = rows_of(recipe, TINY, *combinations, steps=2)
    assert (reference.verdict, failed.verdict, other.verdict) == ("reference", "failed", "agrees")
    assert re.fullmatch(r"rank 1: ValueError: boom \(\S+causal_lm/train\.py:3\)", failed.problem)


@pytest.mark.parametrize(
    ("fails", "verdict", "problem"),
    [
        (True, "failed", "RuntimeError: the loss of step 3 is nan"),
        (False, "differs", "the weights agree; only the evaluation differs"),
    ],
)
def test_evaluations_differ_and_a_reference_fails_only_when_it_is_moved_by_rounding(
    fails, verdict, problem, monkeypatch
):
    line = {"loss": 2.0, "lr": 0.1, "grad_norm": 4.0}
    run = Trained([line], [{"loss": 3.0}], {"weight": np.array([3.0, 4.0])})

    def train(_, combination, seed=None):
        if seed is not None and fails:
            raise RuntimeError("the loss of step 3 is nan")
        return run if combination.strategy == "single" else dataclasses.replace(run, evaluations=[{"loss": 9.0}])

    monkeypatch.setattr(Verification, "_train", train)
    _, *rows = rows_of(PYDOC, TINY, Combination("ddp", 2, 4), Combination("fsdp", 2, 4))
    assert [(row.verdict, row.problem) for row in rows] == [(verdict, problem)] * 2


def test_what_every_reference_would_fail_by_is_reported_once(monkeypatch, capfd):
    """Synchronized BatchNorm is compared with one process at each micro-batch size times processes."""

    def train(*_):
        raise RuntimeError("the weights are wrong")

    monkeypatch.setattr(Verification, "_train", train)
    [row] = rows_of(DIGITS, (), Combination("ddp", 2, 16), Combination("ddp", 2, 8))
    assert (row.verdict, row.problem) == ("failed", "RuntimeError: the weights are wrong")
    # Without a number in the table, none is explained.
    code, output, _ = verify(capfd, str(DIGITS), "--strategies=ddp", "--world-sizes=2")
    assert (code, output.splitlines()[-1]) == (1, "0 of 1 combinations agree with one process")
