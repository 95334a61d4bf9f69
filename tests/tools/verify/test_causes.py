"""What is wrong is named: the likely cause, the weights, random draws without a seed, and what only bf16 shows."""

import re
from types import SimpleNamespace

import pytest

import tasks
from largebatch.tools.verify import verification
from largebatch.tools.verify.causes import likely_cause, symptom_of
from largebatch.tools.verify.verification import Combination, Row
from tasks import SMALL, TINY
from verifying import SGD, recipe_with, rows_of, verify

ALL_OF_IT = {"loss", "grad_norm", "update", "parameters", "evaluation", "first_loss", "first_grad_norm"}
WEIGHTS = {"update", "parameters", "evaluation"}
LATER = {"loss", "grad_norm", "parameters"}


def cause_of(*rows):
    """The likely cause, where whatever differs in bf16 agrees in fp32."""
    config = SimpleNamespace(precision="fp32", batch=SimpleNamespace(micro_batch_size=8))
    held = SimpleNamespace(config=config, fault_of_samples=lambda: None, agrees_in_fp32=lambda _: True)
    return likely_cause([Row(Combination("single", 1, 8), "reference"), *rows], held)


def test_a_likely_cause_is_what_all_that_differ_have_in_common():
    strategies = ("ddp", "fsdp", "zero1")
    combinations = [Combination(name, size, micro) for name in strategies for size in (1, 2) for micro in (4, 8)]

    def half_the_size(each):
        return each.micro_batch_size == 4

    def two_processes(each):
        return each.world_size == 2

    def cause(differs, problem="", beyond=ALL_OF_IT, more=(), is_scaled=False):
        differing = {"verdict": "differs", "problem": problem, "beyond": frozenset(beyond), "is_scaled": is_scaled}
        rows = [Row(each, **differing) if differs(each) else Row(each, "agrees") for each in combinations]
        return cause_of(*rows, *more)

    # A factor is told from what noise or other samples of a micro-batch make.
    scaled = cause(half_the_size, is_scaled=True)
    assert scaled.startswith("the first loss and its gradient differ by one factor for other micro-batch sizes only")
    assert "other samples" not in scaled
    # Equal sizes may differ as well, but later.
    noisy = [Row(Combination("ddp", 2, 8), "differs", beyond=frozenset({"evaluation"}))]
    said = cause(half_the_size, more=noisy)
    assert said.startswith("the first loss differs for other micro-batch sizes only: samples that share a micro-batch")
    assert "such as their number" in cause(two_processes, is_scaled=True)
    # On one process, ZeRO steps all parameters as one, and FSDP whole ones.
    assert "of such a piece" in cause(
        lambda each: (each.strategy, each.world_size) in {("zero1", 1), ("zero1", 2), ("fsdp", 2)}, beyond=WEIGHTS
    )
    assert "ZeRO overwrites them with copies of its own" in cause(lambda each: each.strategy == "zero1", beyond=WEIGHTS)
    assert "outside of the forward pass of their own layer" in cause(lambda each: each.strategy == "fsdp")
    assert "depends on the process" in cause(two_processes)
    # A running average of micro-batches, as a generator of one's own, also differs on one process.
    kept = cause(lambda each: (each.world_size, each.micro_batch_size) != (1, 8))
    assert kept.startswith("whatever divides the batch in another way differs")

    # One process with twice as many micro-batches differs like two with half of them, and two with as many do not.
    def other_number(each):
        return each.world_size * each.micro_batch_size != 8

    another = "where a process has another number of micro-batches in a step, "
    assert cause(other_number).startswith(f"{another}the first loss differs")
    assert cause(other_number, beyond=LATER).startswith(f"{another}weights or losses differ after the first step")
    gradients = ALL_OF_IT - {"loss", "first_loss"}
    assert "the model draws random numbers" in cause(half_the_size, beyond=gradients)
    assert "a hook changes that of each" in cause(lambda each: each != Combination("ddp", 1, 8), beyond=gradients)
    assert "the first samples do not show" in cause(half_the_size, beyond=LATER)
    for none in (lambda _: True, lambda _: False, lambda each: each.strategy == "ddp"):
        assert cause(none) is None
    assert cause(two_processes, verification.UNSEEDED, beyond=()) is None
    # What has failed has a sentence of its own.
    failed = Row(Combination("ddp", 4, 8), "failed")
    assert "share a micro-batch" in cause(half_the_size, more=[failed])
    # What cannot be told apart is all named.
    combinations = [Combination("zero1", 2, 4)]
    assert all(part in cause(lambda _: True) for part in ("share a micro-batch", "a penalty on weights", "the process"))
    assert all(
        part in cause(lambda _: True, beyond=gradients) for part in ("all_gather", "a hook changes that of each")
    )


@pytest.mark.parametrize(
    ("beyond", "symptom", "said"),
    [
        (ALL_OF_IT, "first_loss", "data or noise depends on the process"),
        (ALL_OF_IT - {"loss", "first_loss"}, "first_grad_norm", "but not its gradient: what `dist.all_gather`"),
        (WEIGHTS, "update", "but not its update"),
        ({"loss", "parameters", "evaluation"}, "later", "the first step and its update agree, later ones do not"),
        ({"loss", "first_loss"}, "reported loss", "gradients and weights agree, only the reported loss does not"),
        ({"evaluation"}, "evaluation", "only evaluations differ"),
    ],
)
def test_what_differs_first_is_told(beyond, symptom, said):
    assert symptom_of(beyond) == symptom
    rows = [
        Row(Combination("ddp", 1, 8), "agrees"),
        Row(Combination("ddp", 2, 8), "differs", beyond=frozenset(beyond)),
        # What follows from the first difference does not hide it.
        Row(Combination("ddp", 3, 8), "differs", beyond=frozenset({*beyond, "evaluation"})),
    ]
    assert said in cause_of(*rows)


@pytest.mark.slow
def test_what_differs_only_in_bf16(tmp_path, monkeypatch, capfd):
    """Half a percent of a gradient is told from the rounding of bf16, with which another micro-batch agrees."""
    bug = """from largebatch.run import Step
def backward(self, loss_sum, original=Step.backward):
    plan = self._backend.plan
    original(self, loss_sum * (1.005 if plan.world_size > 1 and plan.precision == "bf16" else 1.0))
Step.backward = backward
"""
    recipe = recipe_with(bug, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("--precision=bf16", "--strategies=ddp", "--world-sizes=1,2", "--micro-batch-sizes=2", "--steps=4")
    code, output, errors = verify(capfd, str(recipe), *words, "--no-resume", *TINY)
    assert code == 1, errors
    assert re.findall(r"  (\w+)\n", output.split("verdict\n")[1]) == ["reference", "agrees", "differs"]
    assert "in fp32 the first of them agrees: something is computed in bf16" in output


@pytest.mark.slow
def test_an_optimizers_bug_during_a_long_warmup_is_found_in_the_first_update(tmp_path, monkeypatch, capfd):
    """Its rates are near 0 before the end of the warmup, 10^6 steps later, and then too small to show in weights."""
    bug = """import os, torch
def step(self, closure=None, original=torch.optim.AdamW.step):
    before = {weight: weight.detach().clone() for group in self.param_groups for weight in group["params"]}
    original(self, closure)
    for weight, start in before.items():
        if os.environ.get("WORLD_SIZE") == "2" and weight.numel() > 1000:
            weight.data.lerp_(start, 0.1)
torch.optim.AdamW.step = step"""
    recipe = recipe_with(bug, tmp_path)
    recipe.rename(recipe.with_name("tiny.json"))
    monkeypatch.chdir(tmp_path)
    long = ('--train.duration={"steps": 2000000}', '--learning_rate.warmup.duration={"steps": 1000000}')
    rate = ("--learning_rate.base_lr=8e-7", "--learning_rate.scaling=none")
    words = ["--strategies=ddp", "--world-sizes=2", "--micro-batch-sizes=4", "--steps=4", *TINY, *long, *rate]
    code, output, errors = verify(capfd, "causal_lm/tiny.json", *words)
    assert code == 1, errors
    assert """ '--train.duration={"steps": 4}' """ in output
    assert "the first update differs most in " in output
    assert "no run was stopped and resumed, because no combination of several processes agrees" in output
    assert "0 of 1 combinations agree" in output
    row = next(line for line in output.splitlines() if line.startswith("ddp ")).split()
    assert float(row[6]) == pytest.approx(0.1, rel=0.1)
    # The weights agree.
    assert float(row[7]) < 1e-5


@pytest.mark.slow
def test_biases_of_keys_that_are_not_frozen_are_not_compared(tmp_path):
    recipe = tasks.copy("masked_lm", tmp_path) / "bert_pydoc.json"
    model = recipe.with_name("model.py")
    model.write_text(f"{model.read_text()}\nfreeze_key_biases = lambda model: None\n")
    words = (*SMALL, "--batch.global_batch_size=16", "--batch.micro_batch_size=4", "--learning_rate.warmup=null")
    words += ('--optimizer={"name": "adamw", "weight_decay": 0.01, "eps": 1e-15}',)
    _, row = rows_of(recipe, words, Combination("ddp", 2, 4), steps=2)
    assert row.verdict == "agrees"
    assert "key.bias; call freeze_key_biases(model) in build_model" in row.problem


@pytest.mark.slow
def test_randomness_without_the_seed_is_not_called_rounding(tmp_path):
    """NumPy's numbers are others in each job, as in processes that are not forked from one server."""
    bug = """from largebatch.run import Step
import numpy as np
def backward(self, loss_sum, original=Step.backward):
    original(self, loss_sum * (1 + np.random.rand()))
Step.backward = backward
"""
    _, row = rows_of(recipe_with(bug, tmp_path), (*TINY, *SGD), Combination("ddp", 1, 4), steps=2)
    assert (row.verdict, row.problem) == ("differs", verification.UNSEEDED)
