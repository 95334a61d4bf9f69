"""A loss of the whole global batch, against a plain loop that computes it of the whole batch at once."""

import math
import os
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn.functional import normalize, one_hot

import tasks
from jobs import run_job, train, train_in_job
from largebatch.backend.processes import Processes
from largebatch.model.coupled_losses import info_nce, nt_xent, sigmoid_loss
from largebatch.run.coupled import CoupledBatch
from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import read_object
from paths import SIMCLR
from reference import begin, global_batches, train_plainly
from stepping import prepared
from test_strategies import STEPS, assert_same, recorded

pytestmark = pytest.mark.slow

SMALL = (
    "--data.image_size=8",
    "--model.hidden_sizes=[16, 32]",
    "--projection.hidden_size=32",
    "--projection.output_size=16",
    "--batch.global_batch_size=32",
    "--batch.micro_batch_size=8",
    "--learning_rate.base_lr=0.02",
    "--learning_rate.reference_batch_size=32",
    "--learning_rate.warmup=null",
    '--learning_rate.decay={"name": "constant"}',
    "--evaluation.max_samples=24",
)
FP64 = "--precision=fp64"
FEW = "--train.stop_after_steps=4"
# Two steps of 512 and one of the 413 that are left: 6 x 64 + 29, so that of 8 slots one is short and one is empty.
RAGGED = (*SMALL, FP64, "--batch.drop_last=false", "--batch.global_batch_size=512", "--batch.micro_batch_size=64", FEW)
# BatchNorm over the whole global batch, in one process or synchronized over two.
BATCH_NORM = (
    *SMALL,
    FP64,
    FEW,
    '--model={"architecture": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], '
    '"layer_type": "basic", "sync_batch_norm": true}',
    "--data.image_size=16",
    "--batch.global_batch_size=16",
)


def recorded_with_dropout(*arguments):
    """In the projection head of the model that the recipe builds."""
    import largebatch.optim

    build_optimizer = largebatch.optim.build_optimizer

    def with_dropout(model, plan):
        model.head[1] = torch.nn.Sequential(model.head[1], torch.nn.Dropout(0.3))
        return build_optimizer(model, plan)

    largebatch.optim.build_optimizer = with_dropout
    return recorded(*arguments)


def plain(words, steps):
    """The same training in plain PyTorch, the whole global batch at once."""
    from largebatch.data.images import normalize_pixels

    dtype = torch.float64 if FP64 in words else torch.float32
    torch.set_default_dtype(dtype)
    config, model, options = begin(SIMCLR, words)
    groups = [{"params": [p], "weight_decay": options.weight_decay if p.ndim > 1 else 0.0} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    source, _ = tasks.sources("contrastive")(config)
    size = config.batch.global_batch_size
    batches = global_batches(1437, {0: size}, not config.batch.drop_last, steps)
    epochs = iter(epoch for epoch, *_ in batches)

    def mean_loss(indices):
        pixels = source.fetch(indices, next(epochs))["pixel_values"].flatten(0, 1)
        z = model(normalize_pixels(pixels, config.data, dtype))[1]
        z = z / z.square().sum(dim=1, keepdim=True).sqrt()
        # Rows 2n and 2n + 1 are the views of sample n.
        terms = (z @ z.T / config.loss.temperature).exp()
        other = torch.arange(len(z)) ^ 1
        return -(terms[torch.arange(len(z)), other] / (terms.sum(dim=1) - terms.diagonal())).log().mean()

    def tensors(model):
        return ((name, tensor) for name, tensor in model.state_dict().items() if "num_batches" not in name)

    rates = [config.learning_rate.base_lr * size / 32] * steps
    return train_plainly(config, model, optimizer, mean_loss, batches, rates, tensors)


@cache
def reference(words, steps):
    (result,) = run_job(plain, words, steps, strategy="single")
    return result


# --- every division of a global batch -----------------------------------------------------------------------------

IN_FP64 = (*SMALL, FP64, FEW)


@pytest.mark.parametrize(
    ("words", "of_micro_batch", "strategy", "world_size", "tolerance"),
    [
        # DeepSpeed has no fp64.
        (SMALL, 8, "zero3", 2, 1e-5),
        (IN_FP64, 4, "fsdp", 2, 1e-12),
        (RAGGED, 64, "ddp", 4, 1e-12),
    ],
)
def test_same_as_a_plain_loop(words, of_micro_batch, strategy, world_size, tolerance, run_dir):
    place = {"strategy": strategy, "world_size": world_size}
    divided = (*words, f"--batch.micro_batch_size={of_micro_batch}")
    result = run_job(recorded, SIMCLR, run_dir, *divided, **place)[0]
    steps = 4 if FEW in words else STEPS
    assert_same(result, reference(words, steps), steps, tolerance)


def test_dropout_is_the_same_in_both_passes(tmp_path):
    """So two passes train as one does, in which there is nothing to be the same."""
    words = (*IN_FP64, "--batch.micro_batch_size=16")
    one, two = (
        run_job(recorded_with_dropout, SIMCLR, tmp_path / couple, *words, f"--compute.couple={couple}", strategy="fsdp")
        for couple in ("one_pass", "two_passes")
    )
    assert_same(two[0], one[0], 4, tolerance=1e-12)


def test_batch_norm_counts_each_micro_batch_once_though_two_passes_see_it(run_dir):
    """Weights and running statistics, with statistics of the whole global batch."""
    words = (*BATCH_NORM, "--compute.couple=two_passes")
    result = run_job(recorded, SIMCLR, run_dir, *words, strategy="fsdp")[0]
    expected = reference(BATCH_NORM, 4)
    assert any("running_mean" in name for name in expected["weights"][0])
    assert_same(result, expected, 4, tolerance=1e-11)


@pytest.mark.parametrize("loss", [info_nce, sigmoid_loss])
def test_tiles_add_up(loss, monkeypatch):
    """Of 50 samples, seven at a time: the loss, and the gradients of vectors, scale and bias."""

    class Alone(Processes):
        device = torch.device("cpu")
        plan = SimpleNamespace(precision="fp64", world_size=1, micro_batch_size=50)

    monkeypatch.setattr("largebatch.run.coupled.PAIRS_PER_TILE", 50 * 7)
    torch.manual_seed(0)
    first, second = normalize(torch.randn(2, 50, 8, dtype=torch.float64), dim=-1)
    # Of these, `info_nce` does without the bias.
    encoded = {"first": first, "second": second, "scale": torch.tensor(3.0).double()}
    encoded["bias"] = torch.tensor(-1.0).double()
    for leaf in encoded.values():
        leaf.requires_grad_()
    batch = CoupledBatch(Alone(0, 1, 50), 50, [encoded], loss, is_first=False)
    batch.surrogate(0, encoded).backward()
    whole = loss(slice(0, 50), encoded, encoded).sum()
    torch.testing.assert_close(batch.loss_sum, whole.detach(), rtol=1e-12, atol=0)
    exact = torch.autograd.grad(whole, encoded.values(), materialize_grads=True)
    for leaf, gradient in zip(encoded.values(), exact, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_neighbors_vote(run_dir):
    """What was logged is what the saved weights give at once: bank and evaluation set divide unevenly."""
    words = (*SMALL, "--train.stop_after_steps=2", "--neighbors.bank_samples=50", "--batch.micro_batch_size=4")
    words = (*words, "--batch.global_batch_size=24", "--evaluation.max_samples=46")
    train_in_job(SIMCLR, run_dir, *words, strategy="zero3", world_size=3)
    (logged,) = read_json_lines(run_dir / "evaluations.jsonl")
    (expected,) = run_job(accuracy_of, run_dir / "model/model.safetensors", words, strategy="single")
    assert logged["knn_accuracy"] == pytest.approx(expected, abs=1e-12)
    assert 0.2 < expected < 1


def accuracy_of(file, words):
    from largebatch.config import load_config
    from largebatch.data.images import digits, normalize_pixels

    config = load_config(SIMCLR, words)
    model = tasks.build_model(SIMCLR)(config).eval()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in load_file(file).items()})

    def encoded(source, count):
        batch = source.fetch(np.arange(count), None)
        return normalize(model(normalize_pixels(batch["pixel_values"], config.data))[0], dim=-1), batch["labels"]

    bank, evaluation = digits(config.data)
    known, answers = encoded(bank, 50)
    asked, labels = encoded(evaluation, 46)
    similarities, nearest = (asked @ known.T).topk(config.neighbors.count)
    votes = one_hot(answers[nearest], 10) * (similarities / config.neighbors.temperature).exp().unsqueeze(-1)
    return (votes.sum(dim=1).argmax(dim=1) == labels).double().mean().item()


# --- what is refused, and what is not finite ----------------------------------------------------------------------


def loop_with(mistake, run_dir):
    """Train with a mistake in the loop, and return the error."""
    if mistake == "not declared":
        tasks.module("contrastive", "config").Config.coupled_features = 0
    run, _, model, train_set = prepared(SIMCLR, run_dir, *SMALL, "--logging.trackers=[]")
    passes = [0]

    def encode(batch):
        passes[0] += 1
        pixels = batch["pixel_values"].flatten(0, 1).float() / 255
        if mistake == "other augmentation" and passes[0] > 2:
            pixels = pixels.flip(-1)
        features = model(pixels)[1]
        if mistake == "too few numbers":
            features = features[:, 1:]
        features = normalize(features, dim=-1)
        features = features if mistake == "a row a view" else features.unflatten(0, (-1, 2))
        return {"views": features, "scale": features.new_full((), 5.0), "bias": features.new_zeros(())}

    def loss(rows, own, everyone):
        if mistake == "a trained temperature":
            everyone = {**everyone, "scale": next(model.parameters()).sum()}
        if mistake == "only each other":
            return nt_xent(slice(0, rows.stop - rows.start), own, {**everyone, "views": everyone["views"][rows]})
        if mistake == "others detached":
            everyone = {**everyone, "views": everyone["views"].detach()}
        if mistake == "another loss":
            return torch.zeros(rows.stop - rows.start)
        losses = nt_xent(rows, own, everyone) + everyone["bias"]
        return losses.sum() if mistake == "not by sample" else losses

    try:
        for step in run.steps(train_set):
            if mistake in ("after backward", "not called"):
                for batch in step.micro_batches():
                    step.backward(encode(batch)["views"].sum())
            if mistake == "a trained temperature":
                loss = torch.compile(loss, backend="aot_eager")
            if mistake != "not called":
                step.couple(encode, loss)
            run.update(step)
            if step.index == 2:
                return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("none", "no error"),
        ("not declared", "make coupled_features of Config in config.py return"),
        ("not called", "the loss compares samples, but step.couple was not called in this step"),
        ("after backward", "step.couple was called twice, or after step.backward"),
        ("a row a view", "one row per sample, for 8 samples; given 'views' of shape (16, 16)"),
        ("too few numbers", "`encode` returns 30 numbers per sample, but the plan counts 32"),
        ("a trained temperature", "the loss depends on the parameter "),
        ("another loss", "the loss does not depend on what `encode` returns"),
        ("not by sample", "for 32 samples the loss has shape (); return the loss of each sample"),
        ("only each other", "compare the samples in `rows` with all samples, not only with each other"),
        ("others detached", "the loss has no gradient for the samples that it compares its own with"),
        (
            "other augmentation",
            "BackendMismatch: step.couple: `encode` returns other features for a micro-batch when it",
        ),
    ],
)
def test_mistakes_of_a_loop(mistake, words, run_dir):
    # Where processes agree on the error, there are two.
    strategy = "ddp" if mistake in ("none", "other augmentation") else "single"
    for report in run_job(loop_with, mistake, run_dir, strategy=strategy):
        assert words in report


def train_with_nan(run_dir, where, words):
    """The loss, or the features of the second process, are not finite in the third step."""
    from largebatch.run import Step

    couple = Step.couple

    def bad_couple(step, encode, loss):
        if step.index != 2 or os.environ["RANK"] != "1":
            return couple(step, encode, loss)
        if where == "features":
            return couple(step, lambda batch: {name: each * math.nan for name, each in encode(batch).items()}, loss)
        # Only its value: the gradient is finite.
        return couple(step, encode, lambda *given: loss(*given) + math.inf)

    Step.couple = bad_couple
    train(SIMCLR, *words, run_dir=run_dir)


@pytest.mark.parametrize(("strategy", "where"), [("fsdp", "loss"), ("zero2", "features")])
def test_a_step_that_is_not_finite_is_skipped_by_all(strategy, where, run_dir):
    words = (*SMALL, "--train.stop_after_steps=6", "--logging.every=5", "--faults.on_non_finite=skip")
    run_job(train_with_nan, run_dir, where, words, strategy=strategy)
    summary = read_object(run_dir / "summary.json")
    assert summary["bad_steps"] == 1
    assert math.isfinite(summary["train_loss"])
