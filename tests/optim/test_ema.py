"""Moving averages of the weights: against plain loops, on every strategy, in checkpoints, evaluations and exports."""

import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from evaluate_saved import evaluate_saved
from jobs import failure_of, run_job, train
from largebatch.config import as_json, load_config
from largebatch.config.differences import differences
from largebatch.errors import UserError
from largebatch.optim.build import build_optimizer
from largebatch.plan import explain, resolve
from largebatch.run.checkpoint.export import export
from largebatch.storage.files import read_json_lines
from paths import DIGITS, PYDOC
from reference import reference_pydoc
from resuming import assert_same_weights
from stepping import prepared, take
from test_strategies import SIZES, SMALL_GPT
from whole_state import whole_state

HALF_LIFE = 100
EMA = f'--optimizer.ema_half_life={{"samples": {HALF_LIFE}}}'
STEPS = 12
SIZE_AT = {0: 16, 6: 32, 10: 96}
GROWING = (*SMALL_GPT, f"--batch.global_batch_size={SIZES}", f"--train.stop_after_steps={STEPS}", EMA)


def averaged(weights, samples, half_life):
    """The mean of weights after each step, by its definition: a sum that decays, over a sum of shares that decays."""
    totals = dict.fromkeys(weights[0], 0.0)
    share = 0.0
    for found, size in zip(weights, samples, strict=True):
        decay = 0.5 ** (size / half_life)
        totals = {name: decay * totals[name] + (1 - decay) * found[name].astype(np.float64) for name in totals}
        share = decay * share + 1 - decay
    return {name: total / share for name, total in totals.items()}


def plan_of(*words, recipe=PYDOC, world_size=1):
    return resolve(load_config(recipe, words), world_size)


@pytest.mark.parametrize("half_life", ['{"samples": 320}', '{"tokens": 20480}', '{"steps": 10}'])
def test_units(half_life):
    plan = plan_of(f"--optimizer.ema_half_life={half_life}", "--data.block_size=64", "--batch.global_batch_size=32")
    assert plan.ema_weight_at(0) == 1
    assert plan.ema_weight_at(4) == pytest.approx((1 - 0.5**0.1) / (1 - 0.5**0.5), rel=1e-12)
    assert " = 10 steps, a decay of 0.933033 per step" in explain(plan, "")
    # Far beyond any run: all steps count the same.
    longest = plan_of(f'--optimizer.ema_half_life={{"steps": {2**63 - 1}}}')
    assert longest.ema_weight_at(4) == pytest.approx(1 / 5, rel=1e-12)


@pytest.mark.parametrize("name", ['"sgd", "momentum": 0', '"adamw"', '"muon"', '"lars"'])
def test_one_more_state_of_every_optimizer(name):
    """Of the tensors that it steps, in their dtype; the estimate of memory and checkpoints go by what is declared."""
    plan = plan_of(f'--optimizer={{"name": {name}, "weight_decay": 0.1}}', EMA)
    model = nn.Linear(3, 4, dtype=torch.float64)
    optimizer = build_optimizer(model, plan)
    found = []
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
            group["ema_weight"] = plan.ema_weight_at(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        found.append({each: parameter.detach().numpy().copy() for each, parameter in model.named_parameters()})
    expected = averaged(found, [plan.batch_at(step).size for step in range(5)], HALF_LIFE)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = plan.states_of(tuple(parameter.shape), group)
            assert optimizer.state[parameter].keys() == states.keys()
            assert states["ema"] == parameter.shape
    for each, parameter in model.named_parameters():
        np.testing.assert_allclose(optimizer.state[parameter]["ema"], expected[each], rtol=1e-12)


def recorded_averages(recipe, run_dir, *words, bad_steps=()):
    """Train, and return the weights and their averages after each update; some of them are of gradients of NaN."""
    from largebatch.run import Run, Step

    found = []
    update = Run.update
    backward = Step.backward

    def poisoned(step, loss_sum):
        backward(step, loss_sum * float("nan") if step.index in bad_steps else loss_sum)

    def update_and_record(run, step):
        update(run, step)
        # The optimizer has no state before its first step.
        kinds = ("weight", "ema") if run.backend.optimizer.state else ("weight",)
        found.append({kind: whole_state(run.backend, kind) for kind in kinds})

    Step.backward = poisoned
    Run.update = update_and_record
    train(recipe, "--logging.trackers=[]", *words, run_dir=run_dir)
    return found


@pytest.fixture(scope="module")
def plain_averages():
    (found,) = run_job(reference_pydoc, PYDOC, SMALL_GPT, STEPS, SIZE_AT, strategy="single")
    sizes = [next(size for step, size in reversed(SIZE_AT.items()) if step <= each) for each in range(STEPS)]
    return averaged(found["weights"], sizes, HALF_LIFE)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stops"), [("fsdp", ()), ("zero2", (7,)), ("zero3", ())])
def test_as_a_plain_loop_averages(strategy, stops, plain_averages, run_dir, tmp_path):
    """Evaluated, in the checkpoint, also of a run that stops and goes on, and exported; weights go on as if they had
    not been evaluated."""
    words = (*GROWING, '--evaluation.every={"steps": 5}')
    for step in (*stops, STEPS):
        stop = f"--train.stop_after_steps={step}"
        found = run_job(recorded_averages, PYDOC, run_dir, *words, stop, strategy=strategy)[0]
    export(run_dir, tmp_path / "ema/model", ema=True)
    exported = load_file(tmp_path / "ema/model/model.safetensors")
    for name, expected in plain_averages.items():
        for average in (found[-1]["ema"][name], exported[name]):
            difference = np.linalg.norm(average - expected) / np.linalg.norm(expected)
            assert difference <= 1e-5, (name, difference)
    assert_same_weights(run_dir / "model", exported_from(run_dir, tmp_path / "plain"))
    last = read_json_lines(run_dir / "evaluations.jsonl")[-1]
    shutil.copy(run_dir / "config.json", tmp_path / "ema")
    assert last["loss"] == pytest.approx(evaluate_saved(run_dir)["loss"], rel=1e-5)
    assert last["ema/loss"] == pytest.approx(evaluate_saved(tmp_path / "ema")["loss"], rel=1e-5)
    assert abs(last["ema/loss"] - last["loss"]) > 1e-3
    assert last["ema/perplexity"] == pytest.approx(np.exp(last["ema/loss"]))


def exported_from(run_dir, out, **options):
    export(run_dir, out, **options)
    return out


@pytest.mark.slow
def test_running_statistics_are_averaged_too(run_dir, tmp_path):
    """A step that is skipped moves no average, and the first that is not is where they begin."""
    words = (
        EMA,
        "--train.stop_after_steps=5",
        '--evaluation.every={"steps": 2}',
        "--precision=fp64",
        "--faults.on_non_finite=skip",
        "--data.image_size=16",
    )
    record = partial(recorded_averages, bad_steps=(0, 3))
    (found,) = run_job(record, DIGITS, run_dir, *words, strategy="single")
    for kind in ("weight", "ema"):
        for name, value in found[2][kind].items():
            # Evaluations set the counter.
            if "num_batches" not in name:
                np.testing.assert_array_equal(value, found[3][kind][name])
    plan = plan_of(*words, recipe=DIGITS)
    exported = load_file(exported_from(run_dir, tmp_path / "ema", ema=True) / "model.safetensors")
    assert load_file(run_dir / "model/model.safetensors").keys() == exported.keys()
    names = [name for name in exported if "num_batches" not in name]
    assert sum("running" in name for name in names) > 10
    for name in names:
        average = found[1]["weight"][name]
        for step in (2, 4):
            weight = plan.ema_weight_at(step)
            average = (1 - weight) * average + weight * found[step]["weight"][name]
        np.testing.assert_allclose(exported[name], average, rtol=1e-12, atol=1e-15)


def test_a_run_that_is_resumed_must_be_allowed_to_change_it():
    recorded = as_json(load_config(PYDOC))
    assert "optimizer.ema_half_life.samples" in differences(recorded, load_config(PYDOC, (EMA,)))


@pytest.mark.slow
def test_not_turned_on_between_starts_of_a_run(run_dir, tmp_path):
    words = (*GROWING[:-2], "--logging.trackers=[]", "--train.stop_after_steps=2")
    assert failure_of(partial(train, run_dir=run_dir), PYDOC, *words, strategy="single") is None
    with pytest.raises(UserError, match=r"it has no averaged weights; leave out --ema, or train with optimizer.ema_"):
        export(run_dir, tmp_path / "none", ema=True)
    words = (*words[:-1], "--train.stop_after_steps=4", EMA, "--allow-change", "optimizer.ema_half_life")
    failure = failure_of(partial(train, run_dir=run_dir), PYDOC, *words, strategy="single")
    assert re.search(r"it has no ema/\S+, which this optimizer needs; restore the earlier section", failure)


def fail_alone(run_dir):
    run, _, model, train_set = prepared(PYDOC, run_dir, *SMALL_GPT, EMA)
    steps = run.steps(train_set)
    take(next(steps), run, model)
    with run.backend.averaged_weights():
        if run.backend.rank == 1:
            raise ValueError("one process alone")
        run.backend.gather_objects(None)


@pytest.mark.slow
def test_an_evaluation_that_fails_on_one_process_ends(run_dir):
    """ZeRO communicates to put weights back, which the other process does not do yet."""
    assert "ValueError: one process alone" in failure_of(fail_alone, run_dir, strategy="zero2", timeout=120)
