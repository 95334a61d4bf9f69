"""The gradient noise scale: its formulas, the gradients that every strategy measures, and what a run says of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp
from torch.nn.functional import cross_entropy

import tasks
from jobs import train_in_job
from largebatch.batch.noise_scale import noise_scale
from largebatch.config import load_config
from largebatch.data.order import epoch_order
from largebatch.errors import ConfigError
from largebatch.plan import explain, resolve
from largebatch.run.record.noise_scale import NoiseScale
from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import read_object
from paths import ADDITION, DIGITS, SIMCLR
from reference import begin, global_batches

EVERY_STEP = '--logging.noise_scale={"every": 1}'


# --- the formulas -----------------------------------------------------------------------------------------------------


def lines(gradients, traces):
    return [{"squared_gradient": each, "trace": trace} for each, trace in zip(gradients, traces, strict=True)]


def p_value(gradients, traces, ratio):
    """Of the mean of traces - ratio x gradients being 0: Student's t."""
    return ttest_1samp(np.array(traces) - ratio * np.array(gradients), 0).pvalue


@pytest.mark.parametrize(("spread", "count"), [(0.5, 50), (2, 3), (5, 9)])
def test_the_interval_has_all_ratios_that_student_does_not_exclude(spread, count):
    random = np.random.default_rng(2)
    gradients = random.normal(2, spread, count)
    traces = random.normal(60, 20, count) + 3 * gradients
    found = noise_scale(lines(gradients, traces))
    assert found["samples"] == pytest.approx(traces.mean() / gradients.mean())
    assert found["measurements"] == count
    high = found["high"] or 1e9
    assert found["low"] < found["samples"] < high
    for end in (found["low"], high):
        p = p_value(gradients, traces, end)
        # A noise scale is not negative, and may have no upper end.
        assert p == pytest.approx(0.05, abs=1e-3) if 0 < end < 1e9 else p > 0.05
    assert (found["high"] is None) == (ttest_1samp(gradients, 0).pvalue > 0.05)


def test_measurements_without_spread_have_an_interval_without_width():
    found = noise_scale(lines([2.0] * 3, [60.0] * 3))
    assert found == pytest.approx({"samples": 30, "low": 30, "high": 30, "measurements": 3})


def test_there_is_no_scale_without_a_gradient_or_noise():
    why = "1 measurement; it takes 2, in steps of 2 or more micro-batches"
    assert noise_scale(lines([1.0], [5.0])) == {"not_measured": why}
    random = np.random.default_rng(3)
    gradients = random.normal(-0.1, 0.5, 50)
    told = noise_scale(lines(gradients, [60.0] * 50))["not_measured"]
    assert told.startswith("the squared gradient cannot be told from zero after 50 measurements; the noise scale is ")
    low = float(told.split()[-4].replace(",", ""))
    assert p_value(gradients, [60.0] * 50, low) == pytest.approx(0.05, rel=0.05)
    why = "the noise cannot be told from zero after 2 measurements"
    assert noise_scale(lines([1.0, 2.0], [-5.0, 4.0])) == {"not_measured": why}
    # The sum is positive by the largest measurement alone.
    found = noise_scale(lines([-1.0] * 49 + [60.0], [60.0] * 50))
    assert (found["samples"], found["high"]) == (pytest.approx(50 * 60 / 11), None)


# --- the gradients ----------------------------------------------------------------------------------------------------

# Answers of unequal lengths, tied weights, a ragged batch as the third. The weights stay.
FIXED = (
    '--model.config={"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, '
    '"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": true}',
    # In its order, micro-batches of each step have different numbers of target tokens.
    "--seed=9",
    "--data.num_train_samples=57",
    "--data.num_eval_samples=8",
    "--batch.drop_last=false",
    "--batch.global_batch_size=24",
    "--batch.micro_batch_size=3",
    '--optimizer={"name": "sgd", "weight_decay": 0, "clip_norm": 0.1}',
    "--learning_rate.base_lr=1e-30",
    "--learning_rate.warmup=null",
    '--train.duration={"steps": 60}',
    "--logging.trackers=[]",
)


@pytest.fixture(scope="module")
def expected():
    """The measurements by definition: products of the gradients of different micro-batches of a plain model."""
    config, model, _ = begin(ADDITION, (*FIXED, EVERY_STEP))
    train_set, _ = tasks.sources("sft")(config)
    counted = list(model.parameters())
    lines = []
    for step, (epoch, start, size, _) in enumerate(global_batches(57, {0: 24}, keep_last=True, steps=3), 1):
        indices = epoch_order(57, config.seed, epoch)(np.arange(start, start + size))
        sums = []
        weights = []
        for chunk in np.split(indices, range(3, size, 3)):
            batch = train_set.fetch(chunk, 0)
            logits = model(input_ids=batch["input_ids"]).logits
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            sums.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, counted)]).double())
            weights.append(int((batch["labels"] >= 0).sum()))
        assert len(set(weights)) > 1
        products = torch.stack(sums) @ torch.stack(sums).T / sum(weights) ** 2
        shares = np.array(weights) / sum(weights)
        between = 1 - (shares**2).sum()
        squared_gradient = float(products.sum() - products.trace()) / between
        trace = size * (float(products.sum()) - squared_gradient)
        lines.append({"step": step, "global_batch_size": size, "squared_gradient": squared_gradient, "trace": trace})
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "words"),
    [("ddp", 2, ("--logging.every=100",)), ("hsdp", 4, ()), ("zero2", 2, ()), ("zero3", 2, ())],
)
def test_every_strategy_measures_the_gradients_of_micro_batches(strategy, world_size, words, expected, run_dir):
    environment = {"LARGEBATCH_SHARD_SIZE": "2"} if strategy == "hsdp" else {}
    settings = {"strategy": strategy, "world_size": world_size, "environment": environment}
    # One is resumed.
    for last in (2, 3) if strategy == "zero3" else (3,):
        stop = f"--train.stop_after_steps={last}"
        train_in_job(ADDITION, run_dir, *FIXED, EVERY_STEP, *words, stop, **settings)
    for line, truth in zip(read_json_lines(run_dir / "noise_scale.jsonl"), expected, strict=True):
        assert line == pytest.approx(truth, rel=1e-4)
    summary = read_object(run_dir / "summary.json")["noise_scale"]
    assert summary == pytest.approx(noise_scale(expected), rel=1e-3)
    last = read_json_lines(run_dir / "metrics.jsonl")[-1]
    ends = [last.get(f"noise_scale{end}") for end in ("", "_low", "_high")]
    assert ends == [summary[name] for name in ("samples", "low", "high")]


# --- the run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"), [(DIGITS, "BatchNorm makes"), (SIMCLR, "a loss over the whole global batch makes")]
)
def test_what_couples_samples_is_refused(recipe, why):
    with pytest.raises(
        ConfigError, match=rf"logging.noise_scale: {why} the gradients of samples depend on each other; write null"
    ):
        load_config(recipe, [EVERY_STEP])


def test_the_plan_says_whether_it_is_measured():
    def said(*words):
        plan = resolve(load_config(ADDITION, [*FIXED, *words]), 1)
        shown = [line.strip() for line in explain(plan, "run").splitlines() if "noise scale" in line]
        return shown, NoiseScale(SimpleNamespace(plan=plan), [], print).summary(), measured_after(plan)

    def measured_after(plan):
        return [step for step in range(1, 4) if plan.measures_noise_after(step)]

    assert said() == ([], {}, [])
    nothing = {"noise_scale": noise_scale([])}
    measured = "gradient noise scale measured every 2 steps; biased if the gradients of samples depend on their weights"
    assert said('--logging.noise_scale={"every": 2}') == ([measured], nothing, [2])
    shown = "gradient noise scale not measured: it takes 2 micro-batches per step; lower batch.micro_batch_size"
    assert said(EVERY_STEP, "--batch.micro_batch_size=24") == ([shown], nothing, [])
    # The ragged batch of the third step has nine samples.
    assert said(EVERY_STEP, "--batch.micro_batch_size=12")[-1] == [1, 2]


def test_damaged_lines_and_batches_with_all_weight_in_one_part_are_left_out():
    plan = resolve(load_config(ADDITION, [*FIXED, EVERY_STEP]), 1)
    backend = SimpleNamespace(plan=plan, world_size=1, all_gather=lambda values: values[None])
    good = {"step": 1, "global_batch_size": 4, "squared_gradient": 1.0, "trace": 8.0}
    bad = [{"step": 2}, good | {"trace": "8"}, good | {"squared_gradient": math.nan}, good | {"trace": 10**400}]
    kept = []
    scale = NoiseScale(backend, [good, *bad, good | {"squared_gradient": 1.5}], kept.append)
    scale.add(1, [(1.0, torch.tensor(3.0).double()), (0.0, torch.tensor(0.0).double())], torch.tensor(math.sqrt(3.0)))
    assert scale.line()["noise_scale"] == 16 / 2.5
    assert kept == []
