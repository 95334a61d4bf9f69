"""A rehearsal of the largest batch: it comes first, it is the longest, and the training after it is the same."""

import gc
import json
from unittest.mock import patch

import numpy as np
import pytest

from estimate.test_model_states import settled_bytes
from jobs import run_job
from largebatch.config import load_config
from largebatch.data.mixture import MixedSamples
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
        (SIMCLR, ("--data.image_size=8", "--batch.global_batch_size=64", "--batch.micro_batch_size=8")),
    ],
)
def test_running_statistics_and_coupled_losses(recipe, words, tmp_path):
    """BatchNorm's statistics are those of the training's batches; a coupled loss gets the features of a whole batch."""
    words = (*words, "--train.stop_after_steps=3", "--logging.every=1", "--logging.trackers=[]")
    for name, more in (("plain", ()), ("rehearsed", (REHEARSED,))):
        assert run_interrupted(tmp_path / name, (*words, *more), recipe=recipe) is None
    assert_same_weights(tmp_path / "rehearsed/model", tmp_path / "plain/model")
    assert logs(tmp_path / "rehearsed") == logs(tmp_path / "plain")
    rehearsal, first_step, *_ = read_json_lines(samples_file(tmp_path / "rehearsed", 0))
    if recipe == SIMCLR:
        assert len(rehearsal["hashes"]) == len(first_step["hashes"]) > 2


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


def test_the_longest_samples_of_a_mixture(tmp_path):
    """Those of the source that has the longest of all, where the mixture's evaluation has them."""
    for name, length in (("short", 3), ("long", 9)):
        rows = [json.dumps({"q": "x" * (number % length), "a": "y"}) + "\n" for number in range(1, 40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(row for row in rows if '"q": ""' not in row))
    mixed = [
        {"name": name, "weight": 1, "path": "json", "num_train_samples": 20, "num_eval_samples": 5}
        | {"data_files": dict.fromkeys(("train", "eval"), str(tmp_path / f"{name}.jsonl"))}
        for name in ("short", "long")
    ]
    section = {"source": "datasets", "prompt": "{q}", "answer": "{a}", "tokenizer": "bytes", "block_size": 16}
    data = section | {"sources": mixed, "num_train_samples": 40, "num_eval_samples": 10}
    words = ["--data", json.dumps(data), "--batch.global_batch_size=4", "--batch.micro_batch_size=4"]
    words += ['--train.duration={"steps": 60}', "--evaluation.every=null"]
    samples, _ = sources("sft")(load_config(ADDITION, words))
    longest = samples.longest(2)
    assert set(longest.tolist()) < set(range(20, 40))
    assert samples.fetch(longest, None)["labels"].shape == (2, 9)
    # More than there are.
    assert samples.fetch(samples.longest(30), None)["labels"].shape == (30, 9)
    # Of equal lengths, any will do.
    blocks = MixedSamples(["one"], [sources("causal_lm")(load_config(PYDOC, TINY_GPT))[0]], 0)
    assert len(blocks.longest(3)) == 3


def test_what_a_mixture_leaves_out_is_said():
    skipped = "1 of 42 training pairs has an empty prompt or answer: skipped"
    source = type("Source", (), {"remark": skipped, "num_available": 41, "__len__": lambda _: 40})()
    mixed = MixedSamples(["a", "b"], [source, source], 0)
    assert mixed.remark == f"a: {skipped}; b: {skipped}"
    assert mixed.num_available == 82
