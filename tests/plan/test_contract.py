"""Resolved plans against numbers worked out by hand."""

import json
import math

import pytest

from largebatch.config import load_config
from largebatch.errors import ConfigError, UserError
from largebatch.plan import RunPlan, explain, resolve
from paths import DIGITS, IMAGENET, PYDOC, RECIPES


def planned(recipe, *words, world_size=2):
    return resolve(load_config(recipe, words), world_size)


def test_goyal_8k_on_256_gpus():
    plan = planned(IMAGENET, world_size=256)
    assert plan.max_gradient_accumulation_steps == 1
    assert plan.batch_at(156).epoch == 1  # 1281167 // 8192 steps an epoch
    assert plan.total_steps == 90 * 156
    # Warmup for 5 epochs starts from eta, not from zero; the rate falls after 30, 60 and 80.
    steps = (0, 390, 780, 4679, 4680, 9359, 9360, 12479, 12480)
    rates = (0.1, 1.65, 3.2, 3.2, 0.32, 0.32, 0.032, 0.032, 0.0032)
    assert [plan.lr_at(step) for step in steps] == pytest.approx(rates, rel=1e-12)
    assert (plan.loss_unit, plan.loss_weight_per_sample) == ("samples", 1)
    assert plan.optimizer.clip_norm is None
    assert plan.uses_batch_norm


def test_tokens():
    words = ["--train.duration", '{"tokens": 40961}', "--learning_rate.warmup", "null", "--evaluation.every.epochs=0.1"]
    plan = planned(PYDOC, *words)
    assert (plan.loss_unit, plan.loss_weight_per_sample) == ("tokens", 128)
    assert plan.total_steps == 11  # 40,961 tokens are one more than ten steps
    assert [step for step in range(1, 12) if plan.evaluates_after(step)] == [10, 11]  # 0.1 epochs, and the end


def test_further_sets_have_intervals_and_sizes_of_their_own(monkeypatch):
    with pytest.raises(ConfigError, match=r'evaluation\.sets: train.py does not evaluate "end"; remove it, or'):
        load_config(DIGITS, ['--evaluation.sets={"end": {}}'])
    monkeypatch.setattr(type(load_config(DIGITS)), "further_sets", ("far", "end"))
    sets = '{"every": {"steps": 4}, "sets": {"far": {"every": {"steps": 3}, "max_samples": 30}, "end": {}}}'
    plan = planned(DIGITS, "--evaluation", sets, "--train.stop_after_steps=10")
    due = {name: [step for step in range(1, 11) if plan.evaluates_after(step, name)] for name in (None, "far", "end")}
    assert due == {None: [4, 8, 10], "far": [3, 6, 9, 10], "end": [10]}
    assert [plan.evaluation_of("far").samples_of(size) for size in (20, 8192)] == [20, 30]
    with pytest.raises(UserError, match=r'evaluation.sets: the recipe has no "near", which train.py evaluates; add'):
        plan.evaluates_after(1, "near")
    text = explain(plan, "digits")
    assert '"far" evaluated every 3 steps and at the end' in text
    assert '"end" evaluated at the end' in text
    assert RunPlan.from_json(plan.to_json()).evaluation == plan.evaluation
    with pytest.raises(
        ConfigError, match=r'(?s)"ema/" begins.*evaluation.sets: "then/" begins the names of other metrics'
    ):
        load_config(DIGITS, ['--evaluation.sets={"then": {}, "ema": {}}'])
    with pytest.raises(ConfigError, match=r"evaluation.sets.far.every: is given in tokens, but the samples"):
        load_config(DIGITS, ['--evaluation.sets={"far": {"every": {"tokens": 9}}}'])


@pytest.mark.parametrize(
    ("every", "logged"),
    [
        ("4", {32: [1, 4, 8, 12, 16], 64: [1, 4, 8, 12, 16]}),
        # A batch that is larger than the interval passes several multiples in a step, and has one line.
        ('{"samples": 48}', {32: [1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 16], 64: list(range(1, 17))}),
    ],
)
def test_lines_of_metrics_are_at_the_same_samples_whatever_the_batch(every, logged):
    for batch, steps in logged.items():
        words = ["--batch.global_batch_size", str(batch), "--logging.every", every, "--train.stop_after_steps=16"]
        plan = planned(DIGITS, *words)
        assert [step for step in range(1, 17) if plan.logs_after(step)] == steps


@pytest.mark.parametrize(
    ("every", "written"), [('{"steps": 10}', [10, 20, 25, 30, 40, 50, 60]), ("null", [25, 50, 60])]
)
def test_checkpoints_that_are_kept_for_ever_are_written(every, written):
    words = ["--checkpoint.every", every, "--checkpoint.keep_every.steps=25", "--train.stop_after_steps=60"]
    plan = planned(DIGITS, *words)
    assert [step for step in range(1, 61) if plan.checkpoints_after(step)] == written
    assert [step for step in written if plan.keeps_checkpoint_of(step)] == [25, 50]
    told = "at the end, and at most 4 steps and 1 s after a stop request; one every 25 steps is never deleted"
    assert told in explain(plan, "x")


@pytest.mark.parametrize("batch", [64, 32])
def test_no_warmup_where_scaling_does_not_raise_the_rate(batch):
    """Goyal et al. 2017, section 5.1: warmup only above the reference batch."""
    plan = planned(DIGITS, f"--batch.global_batch_size={batch}")
    assert plan.schedule.warmup == 0
    assert "no warmup: it would start at base_lr 0.1, and the peak is not higher" in explain(plan, "x")
    assert plan.lr_at(0) == pytest.approx(0.1 * batch / 64)


@pytest.mark.parametrize(
    ("decay", "said"),
    [
        ('{"name": "cosine"}', "then cosine from step 0, down to 0; "),
        # The run has 440 steps.
        (
            '{"name": "warmup_stable_decay", "decay": {"steps": 160}}',
            "then constant until step 280, then linear, down to 0; ",
        ),
        (
            '{"name": "warmup_stable_decay", "decay": {"steps": 160}, "final_fraction": 0.1}',
            "then constant until step 280, then linear, down to 0.1 x the peak at the end; ",
        ),
    ],
)
def test_decays_in_words(decay, said):
    assert said in explain(planned(DIGITS, "--learning_rate.decay", decay), "x")


def test_constant_warmup():
    """Goyal et al. 2017, section 2.2: eta for the first epochs, then k eta; here 5 epochs of 2 steps, and k 8."""
    words = ["--batch.global_batch_size=512", "--learning_rate.warmup.shape=constant"]
    plan = planned(DIGITS, *words, '--learning_rate.decay={"name": "constant"}')
    assert [plan.lr_at(step) for step in (0, 9, 10, 39)] == pytest.approx([0.1, 0.1, 0.8, 0.8])
    assert "warmup at 0.1 for 10 steps, then the peak" in explain(plan, "x")


RAMP = '[{"from": {"steps": 0}, "size": 32}, {"from": {"epochs": 1}, "size": 64}, {"from": {"steps": 66}, "size": 128}]'


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_plan_is_read_back_as_it_was(recipe):
    config = load_config(recipe)
    plan = resolve(config, world_size=config.batch.sizes[0] // config.batch.micro_batch_size)
    again = RunPlan.from_json(plan.to_json())
    assert again == plan
    assert explain(again, "x") == explain(plan, "x")


@pytest.mark.parametrize("text", ["", "[]", '{"task": "causal_lm"}'])
def test_what_is_no_plan(text):
    with pytest.raises(ValueError, match="RunPlan"):
        RunPlan.from_json(text)


def test_the_learning_rate_follows_a_batch_size_that_grows():
    """1437 digits: 44 steps of 32, then 22 of 64, then 11 of 128; base_lr 0.1 at batch 64, linear rule, cosine."""
    words = ["--batch.global_batch_size", RAMP, "--learning_rate.warmup=null", '--train.duration={"steps": 77}']
    plan = planned(DIGITS, *words)
    assert [phase.first_step for phase in plan.timeline.phases] == [0, 44, 66]
    assert [plan.micro_steps_of(plan.batch_at(step)) for step in (0, 43, 44, 65, 66)] == [1, 1, 2, 2, 4]
    # Each phase is 1,408 samples, a third of the run, though 44, 22 and 11 steps.
    for step, peak_lr, progress in ((22, 0.05, 1 / 6), (44, 0.1, 1 / 3), (66, 0.2, 2 / 3), (76, 0.2, 32 / 33)):
        assert plan.lr_at(step) == pytest.approx(peak_lr * (1 + math.cos(math.pi * progress)) / 2, rel=1e-12)


def test_a_batch_that_grows_instead_of_the_rate_decaying():
    """Smith et al. 2018: rate over batch, and so SGD's noise, falls as by the step decay with the inverse factor."""
    grows = '[{"from": {"steps": 0}, "size": 64}, {"from": {"epochs": 2}, "size": 320}]'
    words = ["--learning_rate.warmup=null", '--train.duration={"epochs": 4}', "--learning_rate.base_lr=0.3"]
    growth = [*words, "--batch.global_batch_size", grows, '--learning_rate.decay={"name": "batch_growth"}']
    decay = [*words, '--learning_rate.decay={"name": "step", "at": [{"epochs": 2}], "factor": 0.2}']
    growing, decaying = (planned(DIGITS, *found) for found in (growth, decay))
    # 1437 digits: 22 steps of 64, or 4 of 320, an epoch.
    assert [growing.batch_at(step).global_batch_size for step in (43, 44)] == [64, 320]
    assert growing.total_steps == 44 + 8
    assert {growing.lr_at(step) for step in range(52)} == {0.3}
    assert growing.max_peak_lr == 0.3
    assert [decaying.lr_at(step) for step in (43, 44)] == pytest.approx([0.3, 0.3 * 64 / 320])
    text = explain(growing, "x")
    assert "peak 0.3 = 0.3 x 1 (scaling linear): 0.3 was tuned at batch 64; this one is 64" in text
    assert "then constant, while the batch grows" in text


def test_a_growing_batch_warms_up_to_the_rate_of_its_first_size():
    grows = '[{"from": {"steps": 0}, "size": 128}, {"from": {"epochs": 3}, "size": 640}]'
    words = ["--batch.global_batch_size", grows, '--learning_rate.decay={"name": "batch_growth"}']
    plan = planned(DIGITS, *words, '--learning_rate.warmup.duration={"epochs": 1}')
    assert [plan.lr_at(step) for step in (0, 11, 33, 34)] == pytest.approx([0.1, 0.2, 0.2, 0.2])
    assert "warmup from 0.1 to the peak in 11 steps" in explain(plan, "x")


def test_moments_follow_the_batch_size():
    """By hand: 1 - 4 x 0.1, 1 - 4 x 0.01, 1e-6 / 2 (arXiv 2205.10287); and the same half-life in samples."""
    words = ["--batch.global_batch_size=128", "--optimizer.betas=[0.9,0.99]", "--optimizer.eps=1e-6"]
    plans = {rule: planned(PYDOC, *words, "--optimizer.beta_scaling", rule) for rule in ("fixed", "half_life", "sde")}
    assert plans["fixed"].optimizer_options == {"betas": (0.9, 0.99), "eps": 1e-6}
    assert plans["half_life"].optimizer_options == {"betas": (0.9, pytest.approx(0.99**4)), "eps": 1e-6}
    assert plans["sde"].optimizer_options == {"betas": pytest.approx((0.6, 0.96)), "eps": pytest.approx(5e-7)}
    assert {plan.max_peak_lr for plan in plans.values()} == {0.004}
    assert "adamw with betas (0.6, 0.96), eps 5e-07; weight decay 0.1" in explain(plans["sde"], "x")


def decaying(rule, optimizer="adamw", scaling="sqrt", size=128, reference='{"epochs": 2}'):
    """A plan, and 1 / (learning rate x weight decay) steps, in samples, over the samples of the run."""
    words = [
        "--batch.global_batch_size",
        str(size),
        "--learning_rate.scaling",
        scaling,
        '--train.duration={"epochs": 8}',
    ]
    words += ["--learning_rate.reference_duration", reference]
    section = {"name": optimizer, "weight_decay": 0.1, "weight_decay_scaling": rule}
    plan = planned(PYDOC, *words, "--optimizer", json.dumps(section))
    return plan, size / (plan.max_peak_lr * plan.optimizer.weight_decay) / (8 * 3200)


@pytest.mark.parametrize(
    ("optimizer", "scaling", "size"),
    [
        ("adamw", "linear", 16),
        ("adamw", "sqrt", 128),
        ("muon", "none", 16),
        ("lamb", "sqrt", 128),
    ],
)
@pytest.mark.parametrize("reference", ['{"steps": 100}', '{"samples": 6400}', '{"epochs": 2}', '{"tokens": 819200}'])
def test_the_timescale_of_weight_decay_stays_a_share_of_the_run(optimizer, scaling, size, reference):
    plan, share = decaying("timescale", optimizer, scaling, size, reference)
    # Tuned: a batch of 32, a rate of 0.002, a weight decay of 0.1; and two epochs of 3,200 blocks, or 100 steps.
    assert share == pytest.approx(32 / (0.002 * 0.1) / (3200 if "steps" in reference else 6400), rel=1e-12)
    assert f"weight decay {plan.optimizer.weight_decay:.6g}" in explain(plan, "x")


def test_the_best_timescale_follows_the_tokens_per_parameter():
    """Bergsma et al. 2025: 1.084 (tokens per parameter) ** -0.527 of the run, here for any number of parameters."""
    best = [1.084 * (128 * 3200 * epochs / 31400) ** -0.527 for epochs in (2, 8)]
    plan, share = decaying("power_lines")
    # Tuned: a batch of 32, a rate of 0.002, a weight decay of 0.1, two epochs of 3,200 blocks.
    assert share / (32 / (0.002 * 0.1) / 6400) == pytest.approx(best[1] / best[0])
    # 0.2 / 1.92652, which is 4 ** 0.473.
    assert plan.optimizer.weight_decay == pytest.approx(0.103814, abs=1e-6)
    assert "weight decay = 0.1 x 4 / 2 / 4 ** 0.473 (batch, rate, length), arXiv 2505.13738" in explain(plan, "x")


def test_a_linear_ramp():
    ramp = '{"start": 32, "end": 128, "increment": 32, "over": {"epochs": 3}}'
    plan = planned(DIGITS, "--batch.global_batch_size", ramp)
    assert [phase.global_batch_size for phase in plan.timeline.phases] == [32, 64, 96, 128]
    assert [phase.epoch for phase in plan.timeline.phases] == [0, 1, 2, 3]


def test_keep_is_refused_for_batch_norm():
    with pytest.raises(ConfigError, match=r"batch\.drop_last: false changes the loss of a model with BatchNorm"):
        load_config(DIGITS, ["--batch.drop_last=false"])


def test_synchronized_batch_norm_is_over_all_processes():
    plan = planned(IMAGENET, "--model.sync_batch_norm=true", world_size=8)
    assert plan.sync_batch_norm
    text = explain(plan, "resnet50")
    assert "BatchNorm normalizes over micro_batch_size x world_size = 256 samples: changing it" in text
    assert not planned(IMAGENET, world_size=8).sync_batch_norm


def test_a_decay_begins_when_warmup_ends():
    """In the middle between the two, a cosine down to 0.1 is at 0.55 of the peak."""
    plan = planned(PYDOC, "--learning_rate.decay.final_fraction=0.1", "--train.duration", '{"steps": 240}')
    assert plan.schedule.warmup == 40 * plan.batch_at(0).size
    assert plan.lr_of(plan.batch_at(140)) == pytest.approx(0.55 * 0.002, rel=0.02)
