"""`largebatch verify` says that what is the same is the same, and finds what is not."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tasks
from jobs import JobFailed
from largebatch.backend.accelerate_configs import is_rehearsed, rehearsal_environment
from largebatch.backend.launch import read_launch
from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.tools.command_line import main
from largebatch.tools.verify import verification
from largebatch.tools.verify.causes import likely_cause
from largebatch.tools.verify.differences import Differences, Trained, compare, limits_with, usual_limits
from largebatch.tools.verify.training import short_schedule_overrides
from largebatch.tools.verify.verification import Combination, CombinationFailed, Row, Verification
from paths import ACCELERATE_CONFIGS, DIGITS, PYDOC, ROOT
from tasks import SMALL, TINY

SGD = (
    '--optimizer={"name": "sgd", "weight_decay": 0.01, "momentum": 0.9, "nesterov": true, "clip_norm": null}',
    "--learning_rate.base_lr=0.1",
    "--learning_rate.warmup=null",
)
DOCUMENTS = ("--data.samples=documents", "--data.num_train_samples=2000")


def rows_of(recipe: Path, overrides: tuple[str, ...], *combinations: Combination, steps: int = 6):
    comparison = Verification(load_config(recipe, overrides), recipe, overrides, ACCELERATE_CONFIGS, steps=steps)
    return list(comparison.rows(combinations))


def verdicts_of(*arguments, **options) -> list[str]:
    return [row.verdict for row in rows_of(*arguments, **options)]


def recipe_with(bug: str, folder: Path) -> Path:
    """The recipe of a user's own task: a copy of the shipped one, with a bug in its train.py."""
    script = tasks.copy("causal_lm", folder) / "train.py"
    script.write_text(f"{bug}\n{script.read_text()}")
    return script.with_name(PYDOC.name)


EACH_DIVIDES_BY_ITS_OWN_WEIGHT = """
from largebatch.run import Step
def backward(self, loss_sum, original=Step.backward):
    original(self, loss_sum / self._backend.plan.world_size)
Step.backward = backward
"""
# Each is seen by other numbers: the learning rate, the gradients, the evaluation.
BUGS = {
    "the schedule is stepped by every process": (
        """
from largebatch.plan import RunPlan
def lr_of(self, batch, original=RunPlan.lr_of):
    return original(self, batch._replace(samples_before=batch.samples_before * self.world_size))
RunPlan.lr_of = lr_of
""",
        (),
        Combination("fsdp", 2, 4),
    ),
    "unequal token counts are averaged rank by rank": (
        """
from largebatch.backend.base import Backend
def sum_over_processes(self, count):
    return lambda: count * self.world_size
Backend.sum_over_processes = sum_over_processes
""",
        DOCUMENTS,
        Combination("ddp", 2, 4),
    ),
    "samples at the end are evaluated twice": (
        """
import largebatch.run.evaluate as evaluate
def shares(num_samples, batch_size, rank, world_size):
    for start in range(rank * batch_size, -(-num_samples // (batch_size * world_size)) * batch_size * world_size,
                       batch_size * world_size):
        start = start % num_samples
        yield start, min(start + batch_size, num_samples)
evaluate._shares = shares
""",
        (),
        Combination("ddp", 2, 4),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, tmp_path):
    bug, overrides, combination = BUGS[name]
    assert verdicts_of(recipe_with(bug, tmp_path), (*TINY, *SGD, *overrides), combination) == ["reference", "differs"]


@pytest.mark.slow
def test_fp64_differs_by_its_own_rounding_only():
    """Documents of unequal length, ragged batches and clipping, 50 steps: 1e-12 shows mathematics, not luck."""
    words = (*TINY, *SGD, *DOCUMENTS, "--data.num_train_samples=130", "--batch.drop_last=false", "--precision=fp64")
    words += ("--optimizer.clip_norm=0.5", "--data.num_eval_samples=40", '--train.duration={"steps": 100}')
    combinations = [*(Combination(*each) for each in (("ddp", 3, 4), ("fsdp", 2, 4), ("ddp", 4, 2), ("hsdp", 4, 2)))]
    reference, *rows = rows_of(PYDOC, words, *combinations, steps=50)
    assert reference.verdict == "reference"
    for row in rows:
        assert row.verdict == "agrees", row
        assert max(row.differences) <= 1e-12
    assert any(max(row.differences) > 0 for row in rows)


@pytest.mark.slow
def test_fp64_on_zero_is_a_row_that_says_why():
    _, row = rows_of(PYDOC, (*TINY, "--precision=fp64"), Combination("zero2", 2, 4), steps=2)
    assert row.verdict == "failed"
    assert row.problem.startswith("DeepSpeed ZeRO keeps its master weights in fp32")


@pytest.mark.slow
def test_bf16_recipes_can_be_told_from_wrong_ones(tmp_path):
    """Adam's weights differ by some 1e-3 by rounding alone; losses and gradients still tell a bug of half a percent."""
    words = (*TINY, "--precision=bf16")
    combination = Combination("ddp", 2, 2)
    assert verdicts_of(PYDOC, words, combination, steps=8) == ["reference", "agrees"]
    bug = """
from largebatch.run import Step
def backward(self, loss_sum, original=Step.backward):
    original(self, loss_sum * (1.005 if self._backend.plan.world_size > 1 else 1.0))
Step.backward = backward
"""
    assert verdicts_of(recipe_with(bug, tmp_path), words, combination, steps=8) == ["reference", "differs"]


@pytest.mark.slow
def test_batch_norm_is_compared_at_its_own_micro_batch_size():
    combinations = [Combination("ddp", 2, 16), Combination("ddp", 2, 8)]
    rows = rows_of(DIGITS, ("--precision=fp64",), *combinations, steps=3)
    assert [(row.combination.strategy, row.combination.micro_batch_size, row.verdict) for row in rows] == [
        ("single", 16, "reference"),
        ("ddp", 16, "agrees"),
        ("single", 8, "reference"),
        ("ddp", 8, "agrees"),
    ]


@pytest.mark.slow
def test_what_rounding_alone_makes_is_measured(monkeypatch):
    """A ResNet enlarges rounding beyond the usual tolerance; held against itself from weights moved by one rounding."""
    arguments = (DIGITS, (), Combination("ddp", 2, 16))
    _, row = rows_of(*arguments, steps=20)
    assert row.verdict == "agrees"
    assert row.differences.parameters > 1e-6
    assert row.problem.startswith("rounding alone causes such differences: loss ")
    monkeypatch.setattr(verification, "CLEAR", usual_limits(1e-7))
    _, row = rows_of(*arguments, steps=20)
    assert row.verdict == "unclear"
    assert row.problem.endswith("too large to tell apart from errors: use fewer --steps, or --precision fp64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import sys; sys.exit(0)", "UserError: the script trained no step"),
        ("import sys; sys.exit('no')", "rank 0: exit code no"),
        ("raise ValueError('broken')", "rank 0: ValueError: broken ("),
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
    reference, row = rows_of(recipe, TINY, Combination("ddp", 2, 4), steps=2)
    assert (reference.verdict, row.verdict) == ("failed", "failed")
    assert problem in reference.problem
    assert row.problem == "its reference failed, so there is nothing to compare it with"


@pytest.mark.slow
def test_a_script_may_evaluate_nothing_and_leave_by_exit(tmp_path):
    bug = "from largebatch.run import Run\nRun.should_evaluate = False"
    recipe = recipe_with(bug, tmp_path)
    script = recipe.with_name("train.py")
    script.write_text(script.read_text().replace("    run.finish()\n", "    run.finish()\n    raise SystemExit(0)\n"))
    assert verdicts_of(recipe, TINY, Combination("ddp", 2, 4), steps=2) == ["reference", "agrees"]


@pytest.mark.slow
def test_a_failure_is_a_row_that_names_the_process_that_failed_first_and_the_rest_goes_on(tmp_path):
    """The other processes fail because of it, with errors of their own."""
    bug = """import os
if (os.environ.get("WORLD_SIZE"), os.environ.get("RANK")) == ("2", "1"):
    import time; time.sleep(2); raise ValueError("boom")"""
    combinations = [Combination("ddp", 2, 4), Combination("ddp", 3, 4)]
    reference, failed, other = rows_of(recipe_with(bug, tmp_path), TINY, *combinations, steps=2)
    assert (reference.verdict, failed.verdict, other.verdict) == ("reference", "failed", "agrees")
    assert re.fullmatch(r"rank 1: ValueError: boom \(\S+causal_lm/train\.py:3\)", failed.problem)


@pytest.mark.slow
def test_running_statistics_while_the_batch_shrinks_to_one_micro_batch():
    sizes = '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 64}, {"from": {"steps": 3}, "size": 32}]'
    small = ("--data.image_size=8", "--model.hidden_sizes=[8]", "--model.depths=[1]", "--model.embedding_size=8")
    words = (sizes, *small, "--precision=fp64")
    assert verdicts_of(DIGITS, words, Combination("ddp", 2, 16)) == ["reference", "agrees"]


def test_a_reference_that_fails_only_when_it_is_moved_by_rounding(monkeypatch):
    def train(_, combination, timeout, seed=None):  # noqa: ARG001
        if seed is not None:
            raise CombinationFailed("the loss of step 3 is nan")
        return RUN if combination.strategy == "single" else dataclasses.replace(RUN, evaluations=[{"loss": 9.0}])

    monkeypatch.setattr(Verification, "_train", train)
    _, *rows = rows_of(PYDOC, TINY, Combination("ddp", 2, 4), Combination("fsdp", 2, 4))
    for row in rows:
        assert row.verdict == "failed"
        assert row.problem.endswith("perturbed by rounding fails: the loss of step 3 is nan")


# --- the comparison -----------------------------------------------------------------------------------------------

LINES = [{"loss": 2.0, "lr": 0.1, "grad_norm": 4.0}, {"loss": 1.0, "lr": 0.0, "grad_norm": 2.0}]
RUN = Trained(LINES, [{"step": 2, "loss": 3.0}], {"weight": np.array([3.0, 4.0]), "bias": np.zeros(2)})


def test_relative_differences_by_hand():
    changed = Trained(
        [{"loss": 2.002, "lr": 0.1, "grad_norm": 4.0}, {"loss": 1.0, "lr": 0.0, "grad_norm": 1.9}],
        [{"step": 2, "loss": 3.3}],
        {"weight": np.array([3.0, 4.05]), "bias": np.array([1e-6, 0.0])},
    )
    differences = compare(changed, RUN)
    assert differences.loss == pytest.approx(1e-3)
    assert differences.grad_norm == pytest.approx(0.05)
    assert differences.lr == 0.0
    assert differences.evaluation == pytest.approx(0.1)
    assert differences.parameters == pytest.approx(0.01)
    # The bias: against a thousandth of the model's root mean square, 2.5, times the root of its two elements.
    only_bias = dataclasses.replace(RUN, weights={**RUN.weights, "bias": np.array([1e-6, 0.0])})
    assert compare(only_bias, RUN).parameters == pytest.approx(1e-6 / (2.5e-3 * 2**0.5))


@pytest.mark.parametrize(
    "changed",
    [
        dataclasses.replace(RUN, metrics=LINES[:1]),
        dataclasses.replace(RUN, metrics=[LINES[0], {**LINES[1], "lr": 1e-9}]),
        dataclasses.replace(RUN, metrics=[LINES[0], {**LINES[1], "loss": float("nan")}]),
        dataclasses.replace(RUN, metrics=[LINES[0], {**LINES[1], "grad_norm": float("nan")}]),
        dataclasses.replace(RUN, evaluations=[]),
        dataclasses.replace(RUN, evaluations=[{"step": 2, "loss": float("nan")}]),
        dataclasses.replace(RUN, weights={"weight": RUN.weights["weight"]}),
        dataclasses.replace(RUN, weights={**RUN.weights, "bias": np.array([np.nan, 0.0])}),
        dataclasses.replace(RUN, weights={"bias": np.array([np.nan, 0.0]), "weight": RUN.weights["weight"]}),
    ],
)
def test_what_is_missing_or_not_a_number_never_agrees(changed):
    assert compare(RUN, RUN).within(usual_limits(1e-12))
    assert not compare(changed, RUN).within(usual_limits(1e6))


def test_the_learning_rate_must_be_equal():
    assert Differences(1e-7, 1e-6, 0.0, 9e-3, 1e-7, 1e-7, 1e-7).within(usual_limits(1e-6))
    assert not Differences(0.0, 0.0, 1e-16, 0.0, 0.0, 0.0, 0.0).within(usual_limits(1e-6))


def test_rounding_is_granted_to_what_it_was_measured_of():
    """Ten times the loss's own to the loss, the weights' own to weights; to the first step only where models sum."""
    rounding = Differences(1e-5, 1e-4, 0.0, 1e-2, 1e-3, 0.0, 1e-6)
    limits = limits_with(rounding, tolerance=1e-6, sums_within_the_model=False)
    assert Differences(9e-5, 9e-4, 0.0, 9e-2, 9e-3, 9e-7, 9e-7).within(limits)
    equal = Differences(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    beyond = {"loss": 2e-4, "grad_norm": 2e-3, "update": 0.2, "parameters": 2e-2, "evaluation": 2e-6, "lr": 1e-9}
    for name, value in beyond.items():
        assert not equal._replace(**{name: value}).within(limits), name
    first = equal._replace(first_step=2e-6)
    assert not first.within(limits)
    limits = limits_with(rounding, tolerance=1e-6, sums_within_the_model=True)
    assert first.within(limits)
    assert not first._replace(first_step=2e-5).within(limits)


def test_a_failure_in_one_line():
    reports = [(0, "exit code 1", "launching\nwarning\n"), (1, "exit code 2", "x\nerror: write 3\n  - that\nbye\n")]
    assert JobFailed(reports).in_one_line() == "write 3 - that"
    assert JobFailed([(1, "", "[rank 1] error: sample 17 is corrupt\n")]).in_one_line() == "sample 17 is corrupt"
    assert JobFailed(reports[:1]).in_one_line() == "rank 0: exit code 1"
    traceback = 'Traceback:\n  File "/a/task/data.py", line 7, in fetch\n  File "/lib/torch.py", line 9\nValueError: no'
    failed = JobFailed([(1, traceback, "")])
    assert failed.in_one_line(Path("/a/task")) == "rank 1: ValueError: no (/a/task/data.py:7)"


def test_every_part_of_a_long_schedule_occurs_in_its_first_steps():
    milestones = '{"name": "step", "at": [{"epochs": 0.6}, {"epochs": 0.8}], "factor": 0.1}'
    sizes = '[{"from": {"steps": 0}, "size": 24}, {"from": {"steps": 100}, "size": 48}]'
    groups = '[{"parameters": "*", "frozen_until": {"steps": 60}}]'
    words = [
        f"--learning_rate.decay={milestones}",
        f"--batch.global_batch_size={sizes}",
        f"--optimizer.groups={groups}",
        "--learning_rate.scaling=none",
    ]
    for steps, length in ((1, 4), (12, 12)):
        config = load_config(PYDOC, [*TINY, *words])
        short = short_schedule_overrides(config, steps)
        plan = resolve(load_config(PYDOC, [*TINY, *words, *short]), 1)
        assert plan.total_steps == length
        assert plan.batch_at(0).global_batch_size == 24
        assert plan.batch_at(length - 1).global_batch_size == 48
        assert 0 < plan.frozen_steps[0] < length
        rates = [plan.lr_of(plan.batch_at(step)) for step in range(length)]
        peak, last = max(rates), rates[-1]
        assert rates[0] == 0
        assert last == pytest.approx(peak / 100)
        assert any(rate == pytest.approx(peak / 10) for rate in rates)


@pytest.mark.slow
def test_an_optimizers_bug_is_found_during_a_long_warmup(tmp_path, monkeypatch, capfd):
    """Its weights do not move before the end of the warmup, 10^6 steps later."""
    bug = """import os, torch
def step(self, closure=None, original=torch.optim.AdamW.step):
    original(self, closure)
    for group in self.param_groups:
        for weight in group["params"]:
            if os.environ.get("WORLD_SIZE") == "2" and weight.numel() > 1000:
                weight.data.mul_(1 - 10 * group["lr"])
torch.optim.AdamW.step = step"""
    long = ('--train.duration={"steps": 2000000}', '--learning_rate.warmup.duration={"steps": 1000000}')
    recipe = recipe_with(bug, tmp_path)
    monkeypatch.chdir(tmp_path)
    configs = f"--accelerate-configs={ROOT / 'recipes/accelerate_configs'}"
    words = [configs, "--strategies=ddp", "--world-sizes=2", "--micro-batch-sizes=4", "--steps=4", *TINY, *long]
    code, output, errors = verify(capfd, str(recipe), *words)
    assert code == 1, errors
    assert "the schedule of 2,000,000 steps, with all of its phases, is shortened to 4 steps" in output
    assert "the first update differs most in " in output


@pytest.mark.slow
def test_an_optimizers_bug_that_hardly_moves_weights_is_found_in_the_first_update(tmp_path):
    bug = """import os, torch
def step(self, closure=None, original=torch.optim.AdamW.step):
    before = {weight: weight.detach().clone() for group in self.param_groups for weight in group["params"]}
    original(self, closure)
    for weight, start in before.items():
        if os.environ.get("WORLD_SIZE") == "2" and weight.numel() > 1000:
            weight.data.lerp_(start, 0.1)
torch.optim.AdamW.step = step"""
    rate = ("--learning_rate.warmup=null", "--learning_rate.base_lr=1e-6", "--learning_rate.scaling=none")
    _, row = rows_of(recipe_with(bug, tmp_path), (*TINY, *rate), Combination("ddp", 2, 4), steps=1)
    assert row.verdict == "differs", row.problem
    assert row.differences.update == pytest.approx(0.1, rel=0.1)
    # The weights agree.
    assert row.differences.within(usual_limits(1e-5)._replace(update=0.2))
    assert row.problem.startswith("the first update differs most in ")


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


def test_a_likely_cause_is_what_all_that_differ_have_in_common():
    combinations = [Combination(name, size, micro) for name in ("ddp", "zero1") for size in (1, 2) for micro in (4, 8)]

    def cause(differs) -> str | None:
        rows = [Row(each, "differs" if differs(each) else "agrees") for each in combinations]
        return likely_cause(rows, micro_batch_size=8)

    assert "mean over the micro-batch" in cause(lambda each: each.micro_batch_size == 4)
    assert "of a shard" in cause(lambda each: each.strategy == "zero1" and each.world_size == 2)
    assert "rank or the number of processes" in cause(lambda each: each.world_size == 2)
    for none in (lambda _: True, lambda _: False, lambda each: each.strategy == "zero1"):
        assert cause(none) is None


@pytest.mark.slow
def test_randomness_without_the_seed_is_not_called_rounding(tmp_path):
    bug = """from largebatch.run import Step
import os
def backward(self, loss_sum, original=Step.backward):
    original(self, loss_sum * (1 + int.from_bytes(os.urandom(2)) / 2**16))
Step.backward = backward
"""
    _, row = rows_of(recipe_with(bug, tmp_path), (*TINY, *SGD), Combination("ddp", 1, 4), steps=2)
    assert (row.verdict, row.problem) == ("differs", verification.UNSEEDED)


@pytest.mark.slow
def test_state_that_checkpoints_do_not_have_is_found_by_resuming(tmp_path, monkeypatch, capfd):
    """A moving average in train.py, which every run that is not stopped has."""
    recipe = recipe_with("average = 1.0", tmp_path)
    script = recipe.with_name("train.py")
    text = script.read_text().replace("def main() -> None:\n", "def main() -> None:\n    global average\n")
    text = text.replace("        run.update(step)\n", "        average = average * 0.9 + 1\n        run.update(step)\n")
    script.write_text(text.replace("token_losses(batch).sum())", "token_losses(batch).sum() * average)"))
    monkeypatch.chdir(tmp_path)
    configs = f"--accelerate-configs={ROOT / 'recipes/accelerate_configs'}"
    words = [configs, "--strategies=ddp", "--world-sizes=2", "--micro-batch-sizes=4", "--steps=4", *TINY, *SGD]
    code, output, errors = verify(capfd, str(recipe), "--resume", *words)
    assert code == 1, errors
    assert "1 of 1 combinations agree with one process" in output
    assert "differs: a run stopped halfway under ddp with 2 processes, and resumed under single with 1" in output
    assert "keep it with run.keep(name, state)" in output


# --- the command --------------------------------------------------------------------------------------------------


def verify(capfd, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, whose jobs are forked from the server of the other tests."""
    capfd.readouterr()
    code = main(["verify", *words])
    return code, *capfd.readouterr()


@pytest.mark.slow
def test_the_command(tmp_path):
    output = tmp_path / "report.json"
    words = ["--strategies", "ddp,zero2", "--world-sizes=1,2", "--steps=3", "--output", str(output), *TINY]
    command = [sys.executable, "-m", "largebatch", "verify", str(PYDOC), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" agrees") == 8
    assert "8 of 8 combinations agree with one process" in result.stdout
    report = json.loads(output.read_text())
    assert (report["agree"], report["steps"], report["tolerance"]) == (True, 3, 1e-5)
    assert [row["verdict"] for row in report["rows"]] == ["reference"] + ["agrees"] * 8
    assert report["rows"][1]["differences"]["loss"] <= 1e-5
    assert result.stderr == ""


@pytest.mark.slow
def test_the_command_for_a_copy_of_a_recipe_with_a_bug(tmp_path, monkeypatch, capfd):
    recipe = recipe_with(EACH_DIVIDES_BY_ITS_OWN_WEIGHT, tmp_path)
    recipe.rename(recipe.with_name("tiny.json"))
    monkeypatch.chdir(tmp_path)
    configs = f"--accelerate-configs={ROOT / 'recipes/accelerate_configs'}"
    words = [configs, "--strategies=ddp,zero1", "--world-sizes=2", "--steps=3", *TINY, *SGD]
    code, output, errors = verify(capfd, "causal_lm/tiny.json", *words)
    assert code == 1, errors
    assert "differs" in output
    assert "0 of 4 combinations agree" in output
    assert output.count("  differs\n") == 4
    assert json.loads((tmp_path / "runs/tiny.verify.json").read_text())["agree"] is False


def test_hsdp_is_verified_on_two_groups_of_two_or_more(monkeypatch):
    assert [size for size in range(1, 9) if is_rehearsed("hsdp", size)] == [4, 6, 8]
    assert all(is_rehearsed("fsdp", size) for size in range(1, 9))
    config = ROOT / "recipes/accelerate_configs/hsdp.yaml"
    sizes = [read_launch(rehearsal_environment(config, size)).shard_size for size in (1, 2, 3, 4, 8)]
    assert sizes == [1, 2, 3, 2, 2]
    monkeypatch.setenv("LARGEBATCH_SHARD_SIZE", "4")
    assert "LARGEBATCH_SHARD_SIZE" not in rehearsal_environment(config, 8)


@pytest.mark.slow
def test_the_command_with_tiny_data_instead_of_a_hubs(tmp_path, capfd):
    words = ["--tiny-data", "--strategies=ddp", "--world-sizes=2", "--steps=2", f"--output={tmp_path / 'report.json'}"]
    gpt2 = str(PYDOC.with_name("gpt2_124m.json"))
    code, output, errors = verify(capfd, gpt2, *words, "--batch.global_batch_size=16")
    assert code == 0, errors
    # What is given on the command line counts more.
    assert "tiny data, model.vocab_size and a batch of 16 instead of the recipe's own\n" in output
    assert "2 of 2 combinations agree" in output
    output = verify(capfd, str(DIGITS), *words, "--steps=1")[1]
    assert "no tiny data: the recipe's own data is small and always available\n" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--world-sizes=1,3"],
            "global_batch_size 32 is not a multiple of micro_batch_size x world_size = 8 x 3 = 24",
        ),
        (["--strategies=,"], "the list is empty"),
        (["--world-sizes=,"], "the list is empty"),
        (["--output=/proc/nowhere/x.json"], "--output: /proc/nowhere/x.json cannot be written"),
        (['--debug_model={"hidden_sise": 8}'], "model.hidden_sise: unknown key, did you mean hidden_size?"),
        (["--world-sizes=0"], "'0' is not a positive whole number"),
        (["--strategies=ddp,zero4"], "zero4.yaml; known: ddp, fsdp, hsdp, zero1, zero2, zero3"),
        (["--accelerate-configs=nowhere"], "there is no nowhere; add --accelerate-configs FOLDER"),
        (["--batch.micro_batch_size=5"], "32 is not a multiple of batch.micro_batch_size 5; nearest: 30, 35"),
    ],
)
def test_the_command_refuses_before_anything_starts(words, message, capsys):
    try:
        code = main(["verify", str(PYDOC), *words])
    except SystemExit as left:
        code = left.code
    assert code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""
