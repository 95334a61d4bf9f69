"""A rehearsal of the largest batch: it comes first, it is the longest, and the training after it is the same."""

import gc
from unittest.mock import patch

import numpy as np
import pytest

from estimate.test_model_states import settled_bytes
from jobs import run_job
from largebatch.config import load_config
from largebatch.storage.files import read_json_lines
from paths import ADDITION, DIGITS, PYDOC, SIMCLR
from resuming import TINY_GPT, assert_same_weights, exact_log, run_interrupted, samples_file
from stepping import prepared
from tasks import sources

REHEARSED = "--train.rehearse_largest_batch=true"
WORDS = (*TINY_GPT, "--batch.micro_batch_size=3", "--train.stop_after_steps=11")
SMALL_DIGITS = ("--model.depths=[1]", "--model.hidden_sizes=[8]", "--model.embedding_size=8", "--data.image_size=8")


def logs(run_dir):
    return exact_log(run_dir), read_json_lines(run_dir / "evaluations.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("hsdp", 4), ("zero2", 2), ("zero3", 2)])
def test_the_training_has_the_same_bits(strategy, world_size, tmp_path):
    place = {"strategy": strategy, "world_size": world_size}
    assert run_interrupted(tmp_path / "plain", WORDS, **place) is None
    assert run_interrupted(tmp_path / "rehearsed", (*WORDS, REHEARSED), **place) is None
    assert_same_weights(tmp_path / "rehearsed/model", tmp_path / "plain/model")
    assert logs(tmp_path / "rehearsed") == logs(tmp_path / "plain")
    for rank in range(world_size):
        plain, rehearsed = (read_json_lines(samples_file(tmp_path / name, rank)) for name in ("plain", "rehearsed"))
        assert rehearsed[1:] == plain
        # The largest batch has two micro-batches or more on up to four processes: two passes over one of them.
        first, second = rehearsed[0]["hashes"]
        assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (DIGITS, (*SMALL_DIGITS, "--batch.micro_batch_size=16")),
        (SIMCLR, ("--data.image_size=8", "--batch.global_batch_size=64")),
    ],
)
def test_running_statistics_and_coupled_losses(recipe, words, tmp_path):
    """BatchNorm's statistics are those of the training's batches; a coupled loss makes its two passes."""
    words = (*words, "--train.stop_after_steps=3", "--logging.every=1", "--logging.trackers=[]")
    for name, more in (("plain", ()), ("rehearsed", (REHEARSED,))):
        assert run_interrupted(tmp_path / name, (*words, *more), recipe=recipe) is None
    assert_same_weights(tmp_path / "rehearsed/model", tmp_path / "plain/model")
    assert logs(tmp_path / "rehearsed") == logs(tmp_path / "plain")


@pytest.mark.slow
def test_every_start_rehearses_and_evaluates_nothing_twice(tmp_path):
    for last in (5, 8):
        words = (*WORDS[:-1], f"--train.stop_after_steps={last}", REHEARSED)
        assert run_interrupted(tmp_path / "run", words, strategy="single") is None
    assert [line["step"] for line in read_json_lines(tmp_path / "run/evaluations.jsonl")] == [5, 8]
    steps = [line["step"] for line in read_json_lines(samples_file(tmp_path / "run", 0))]
    assert steps == [1, *range(1, 6), 6, *range(6, 9)]


def bytes_before_updates(run_dir):
    """What is live when the gradients of the rehearsal and of the first steps are complete."""
    # So that what exists before training is found.
    with patch.object(gc, "freeze"):
        words = (*WORDS[:-1], "--train.stop_after_steps=3", REHEARSED)
        run, _, model, train_set = prepared(PYDOC, run_dir, *words)
    live = []
    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(model(input_ids=batch["input_ids"]).logits.square().sum())
        live.append(settled_bytes(()))
        run.update(step)
    return live


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_the_memory_of_the_optimizers_states_is_in_use(strategy, tmp_path):
    """They are allocated in the first step, but by ZeRO-3 before it."""
    for rehearsal, first, second, _ in run_job(bytes_before_updates, tmp_path / "run", strategy=strategy):
        assert first < rehearsal == second


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (PYDOC, TINY_GPT),
        (ADDITION, ("--data.num_train_samples=300",)),
        (ADDITION, ("--data.num_train_samples=300", "--data.packing=true", "--data.block_size=32")),
    ],
)
def test_the_longest_samples(recipe, words):
    config = load_config(recipe, words)
    samples, _ = sources(recipe.parent.name)(config)
    lengths = [int((samples.fetch(np.array([index]), 0)["labels"]).shape[1]) for index in range(len(samples))]
    longest = samples.longest(7)
    assert len(set(longest.tolist())) == 7
    assert sorted(lengths[index] for index in longest) == sorted(lengths)[-7:]
