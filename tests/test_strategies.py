"""The same optimization under every strategy and number of processes, against a plain PyTorch loop in one process."""

import json
from functools import cache

import numpy as np
import pytest

from jobs import run_job, train
from largebatch.storage.files import read_json_lines
from paths import ADDITION, BERT, DIGITS, LLAMA, PYDOC, VIT_DIGITS
from reference import reference_addition, reference_digits, reference_pydoc
from whole_state import whole_state

STEPS = 12
SMALL_GPT = ("--model.num_layers=2", "--model.hidden_size=32", "--model.num_heads=2", "--data.block_size=32")
SMALL_VIT = ("--model.hidden_size=32", '--learning_rate.warmup.duration={"steps": 10}')
MIXUP = '--loss={"mixup_alpha": 0.4, "label_smoothing": 0.1}'
WARMUP = '--learning_rate.warmup.duration={"steps": 40}'
# Set in ranges after it is sharded, from nothing but the seed and the parameters' names.
SMALL_LLAMA = (*SMALL_GPT, "--model.num_kv_heads=1", "--model.intermediate_size=47", WARMUP)
SMALL_BERT = (*SMALL_GPT, WARMUP)
SMALL_ADDITION = (
    '--model.config={"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, '
    '"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}',
    "--data.num_eval_samples=40",
    '--learning_rate.warmup.duration={"steps": 6}',
)
# Of 106 sums ten are left at the end of an epoch: in micro-batches of 8 for three processes 8, 2 and none.
KEEP = ("--data.num_train_samples=106", "--batch.drop_last=false", '--train.duration={"steps": 200}')
SIZES = (
    '[{"from": {"steps": 0}, "size": 16}, {"from": {"samples": 96}, "size": 32}, {"from": {"steps": 10}, "size": 96}]'
)
LARS = '--optimizer={"name": "lars", "nesterov": true, "weight_decay": 0.001, "trust_coefficient": 0.01}'
LAMB = '--optimizer={"name": "lamb", "betas": [0.9, 0.99], "weight_decay": 0.1, "clip_norm": 1.0}'
# The block learns more slowly; both patterns match its norms.
GROUPS = json.dumps(
    [
        {"parameters": "*.h.1.*", "lr_factor": 0.3},
        {"parameters": "*.ln_*", "lr_factor": 3},
    ]
)
IN_GROUPS = {".h.1.": 0.3, ".ln_": 3}
LLAMA_GROUPS = GROUPS.replace(".h.", ".layers.").replace(".ln_*", "norm*")
IN_LLAMA_GROUPS = {".layers.1.": 0.3, "norm": 3}
# The overrides of each recipe and the arguments of its independent reference.
RECIPES = {
    "sgd": (DIGITS, (), (reference_digits,)),
    "adamw": (PYDOC, SMALL_GPT, (reference_pydoc, {0: 32})),
    "lars": (DIGITS, (LARS, "--learning_rate.base_lr=0.5"), (reference_digits,)),
    "lamb": (PYDOC, (*SMALL_GPT, LAMB, f"--optimizer.groups={GROUPS}"), (reference_pydoc, {0: 32}, IN_GROUPS)),
    "unequal samples": (
        ADDITION,
        (*SMALL_ADDITION, '--batch={"global_batch_size": 32, "micro_batch_size": 8}'),
        (reference_addition,),
    ),
    "ragged batches": (
        ADDITION,
        (
            *SMALL_ADDITION,
            *KEEP,
            "--batch.global_batch_size=48",
            "--batch.micro_batch_size=8",
            f"--optimizer.groups={LLAMA_GROUPS}",
        ),
        (reference_addition, IN_LLAMA_GROUPS),
    ),
    "growing batch": (
        PYDOC,
        (*SMALL_GPT, f"--batch.global_batch_size={SIZES}"),
        (reference_pydoc, {0: 16, 6: 32, 10: 96}),
    ),
    "vit": (VIT_DIGITS, SMALL_VIT, (reference_digits, 10)),
    "mixup": (VIT_DIGITS, (*SMALL_VIT, MIXUP), (reference_digits, 10)),
    "large model": (LLAMA, SMALL_LLAMA, (reference_pydoc, {0: 32})),
    "masked": (BERT, SMALL_BERT, (reference_pydoc, {0: 64})),
}
TOLERANCE = 1e-5


def recorded(recipe, run_dir, *overrides):
    """Train, and return the metrics, the weights after the first and last step (on rank 0) and the evaluations."""
    from largebatch.run import Run

    weights = []
    update = Run.update
    finish = Run.finish

    def record(run):
        weights.append(whole_state(run.backend))

    # What is wrong in between shows in the losses that follow.
    def update_and_record(run, step):
        update(run, step)
        if step.index == 0:
            record(run)

    def record_and_finish(run):
        record(run)
        finish(run)

    Run.update = update_and_record
    Run.finish = record_and_finish
    words = (f"--train.stop_after_steps={STEPS}", "--logging.every=1", "--logging.trackers=[]", *overrides)
    train(recipe, *words, run_dir=run_dir)
    return {
        "metrics": read_json_lines(run_dir / "metrics.jsonl"),
        "evaluations": read_json_lines(run_dir / "evaluations.jsonl"),
        "weights": weights,
    }


@cache
def reference(name):
    recipe, overrides, (train_plainly, *arguments) = RECIPES[name]
    (result,) = run_job(train_plainly, recipe, overrides, STEPS, *arguments, strategy="single")
    return result


def assert_same(result, expected, steps=STEPS, tolerance=TOLERANCE):
    """Loss, learning rate and gradient norm of each step, and weights after the first and last, up to rounding."""
    assert len(expected["metrics"]) == steps
    for name, allowed in (("loss", tolerance), ("lr", 1e-12), ("grad_norm", tolerance)):
        mine, theirs = ([line[name] for line in run["metrics"]] for run in (result, expected))
        assert mine == pytest.approx(theirs, rel=allowed), name
    for moment in (0, -1):
        for name, tensor in expected["weights"][moment].items():
            difference = np.linalg.norm(result["weights"][moment][name] - tensor) / max(np.linalg.norm(tensor), 1e-8)
            assert difference <= tolerance, (name, difference)


def differences(mine, theirs):
    """What is not equal to the last bit in two results of `recorded`."""
    found = [
        key
        for key in ("loss", "grad_norm")
        if [each[key] for each in mine["metrics"]] != [each[key] for each in theirs["metrics"]]
    ]
    if mine["evaluations"] != theirs["evaluations"]:
        found.append("evaluations")
    for weights, others in zip(mine["weights"], theirs["weights"], strict=True):
        assert weights.keys() == others.keys()
        found += [name for name in weights if not np.array_equal(weights[name], others[name])]
    return found


# Recipe, strategy, number of processes and, where it is not the recipe's own, micro-batch size: each recipe meets
# what could treat it differently. The full product is `bench/agreement.py`; `tests/optim/test_ema.py` has a growing
# batch.
SAMPLE = [
    ("sgd", "ddp", 2),
    ("adamw", "zero2", 1, 8),
    ("lars", "zero1", 2),
    ("lamb", "hsdp", 4, 2),
    ("lamb", "zero3", 2, 4),
    ("ragged batches", "ddp", 3, 8),
    ("ragged batches", "fsdp", 3, 8),
    ("ragged batches", "zero3", 3, 8),
    ("mixup", "ddp", 2, 4),
    ("large model", "fsdp", 2),
    ("large model", "zero3_offload", 2),
    ("masked", "zero1", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLE, ids=lambda sample: "-".join(map(str, sample)))
def test_same_as_a_plain_loop(sample, run_dir):
    name, strategy, world_size, *others = sample
    recipe, overrides, _ = RECIPES[name]
    words = (*overrides, *(f"--batch.micro_batch_size={size}" for size in others), "--evaluation.max_samples=8")
    result = run_job(recorded, recipe, run_dir, *words, strategy=strategy, world_size=world_size)[0]
    assert_same(result, reference(name))


@pytest.mark.slow
def test_bf16_keeps_weights_and_their_reduction_in_fp32(run_dir):
    """Matrix products round to 8 bits, so losses agree to some 1e-3 only; the start checks weights and reduction."""
    words = (*SMALL_GPT, "--precision=bf16", "--evaluation.max_samples=8")
    result = run_job(recorded, PYDOC, run_dir, *words, strategy="zero3")[0]
    mine, theirs = ([line["loss"] for line in run["metrics"]] for run in (result, reference("adamw")))
    assert mine == pytest.approx(theirs, rel=2e-3)
    # It did compute in bf16.
    assert mine != pytest.approx(theirs, rel=1e-6)
    assert {tensor.dtype.name for tensor in result["weights"][-1].values()} == {"float32"}
