"""A run that was interrupted ends as one that was not."""

import json
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from jobs import OTHER_ZERO_LAYOUTS, run_job, train, write_zero_config
from largebatch.storage.run_folder import RunFolder
from paths import DIGITS, PYDOC
from resuming import (
    CHAIN_BATCH,
    TINY_GPT,
    Interruption,
    assert_bit_for_bit,
    assert_close_weights,
    assert_same_weights,
    exact_log,
    run_interrupted,
    samples_of,
    stop_and_resume,
)

pytestmark = pytest.mark.slow

LARS = '--optimizer={"name": "lars", "weight_decay": 0.001}'
STEPS = ("--train.stop_after_steps=13",)
FASTER_BLOCK = '--optimizer.groups=[{"parameters": "*.h.*", "lr_factor": 3}]'
DIGITS_WORDS = (
    "--logging.every=1",
    "--logging.trackers=[]",
    '--evaluation.every={"steps": 6}',
    "--data.image_size=16",
    "--checkpoint.asynchronous=false",
    "--evaluation.max_samples=40",
)


@pytest.mark.parametrize(
    ("recipe", "strategy", "world_size"),
    [
        (PYDOC, "fsdp", 3),
        (PYDOC, "hsdp", 4),
        (PYDOC, "zero3", 2),
        (DIGITS, "zero1", 2),
    ],
)
def test_stopped_twice_and_resumed_bit_for_bit(recipe, strategy, world_size, tmp_path):
    """Stopped by one process's signal and by the stop file, within an epoch, between evaluations and log points.

    DDP and ZeRO-2 are killed in `test_kills.py`, and one process stops in `test_start.py`. GPT has AdamW, and the
    digits LARS.
    """
    words = (TINY_GPT if recipe == PYDOC else (*DIGITS_WORDS, LARS)) + STEPS
    if strategy == "hsdp":
        words += ("--batch.micro_batch_size=2",)
    place = {"strategy": strategy, "world_size": world_size, "recipe": recipe}
    assert run_interrupted(tmp_path / "whole", words, **place) is None
    run_dir = tmp_path / "stopped"
    first = run_interrupted(run_dir, words, Interruption("signal", world_size - 1, 3), **place)
    assert "exit code 75" in first
    run = RunFolder(run_dir)
    end = run.history()[-1]
    assert end["event"] == "stopped"
    # Noted in step 3, agreed on in step 4.
    assert end["step"] == run.checkpoint_step() == 4
    assert "SIGUSR1" in end["message"]
    second = run_interrupted(run_dir, words, Interruption("stop file", 0, 10), **place)
    assert "stopped: by the stop file, after step 11 of" in second
    assert not (run_dir / "stop").exists()
    assert not (run_dir / "model").exists()
    assert run_interrupted(run_dir, words, **place) is None
    assert_bit_for_bit(run_dir, tmp_path / "whole")
    events = [(line["event"], line["step"]) for line in run.history()]
    assert events == [
        ("started", 0),
        ("stopped", 4),
        ("started", 4),
        ("stopped", 11),
        ("started", 11),
        ("finished", 13),
    ]


def test_augmentation_goes_on_where_it_was(tmp_path):
    """Random crops and flips of local images, in mid-epoch; and they are other ones in the next epoch."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("validation", 4)):
        for label in ("cats", "dogs"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    data = {"source": "datasets", "path": str(tmp_path / "images"), "image_size": 16, "num_classes": 2}
    data |= {"num_train_samples": 48, "num_eval_samples": 8, "train_augmentation": "inception_crop"}
    data |= {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    words = (f"--data={json.dumps(data)}", *DIGITS_WORDS[:2], "--batch.global_batch_size=16")
    words = (*words, "--batch.micro_batch_size=4", "--learning_rate.warmup=null", "--train.stop_after_steps=8")
    stop_and_resume(tmp_path, words, Interruption("signal", 1, 3), recipe=DIGITS)
    assert exact_log(tmp_path / "run") == exact_log(tmp_path / "whole")
    contents = samples_of(tmp_path / "whole")
    assert samples_of(tmp_path / "run") == contents
    hashes = [digest for found in contents.values() for micro_batches in found for digest in micro_batches]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(("stage", "settings"), OTHER_ZERO_LAYOUTS)
def test_settings_of_deepspeed_that_lay_out_its_state_otherwise(stage, settings, tmp_path):
    write_zero_config(tmp_path, stage, settings)
    words = (*TINY_GPT, *CHAIN_BATCH, FASTER_BLOCK)
    place = {"strategy": f"zero{stage}", "world_size": 3, "accelerate_configs": tmp_path}
    assert run_interrupted(tmp_path / "whole", (*words, "--train.stop_after_steps=7"), **place) is None
    for last in (3, 7):
        assert run_interrupted(tmp_path / "run", (*words, f"--train.stop_after_steps={last}"), **place) is None
    assert_same_weights(tmp_path / "run/model", tmp_path / "whole/model")


def train_with_slow_copies(run_dir, words):
    """The copy of the state that is to be saved begins when the next step's gradients are there already."""
    from largebatch.run.checkpoint.save import CheckpointWriter

    copy = CheckpointWriter._copy
    CheckpointWriter._copy = lambda *arguments: time.sleep(0.5) or copy(*arguments)
    train(PYDOC, *words, run_dir=run_dir)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_updates_wait_for_the_copy(strategy, tmp_path):
    words = (*TINY_GPT, '--checkpoint.every={"steps": 3}', "--checkpoint.keep_last=null", "--train.stop_after_steps=8")
    run_job(train_with_slow_copies, tmp_path / "run", words, strategy=strategy)
    again = (*words, "--resume", str(tmp_path / "run/checkpoints/step_00000003"))
    assert run_interrupted(tmp_path / "again", again, strategy=strategy) is None
    assert_same_weights(tmp_path / "again/model", tmp_path / "run/model")


# --- other strategies and numbers of processes --------------------------------------------------------------------

FP32_CHAIN = [("ddp", 2), ("zero3", 3), ("fsdp", 2), ("zero1", 1), ("zero2", 2), ("fsdp", 4)]
LAYERWISE_CHAIN = [("zero3", 2), ("hsdp", 4), ("fsdp", 3), ("zero2", 2), ("single", 1)]
FP64_CHAIN = [("fsdp", 3), ("hsdp", 4), ("single", 1), ("ddp", 2)]


@pytest.mark.parametrize(
    ("optimizer", "precision", "chain", "tolerance"),
    [
        ("adamw", "fp32", FP32_CHAIN, 1e-5),
        ("adamw", "fp64", FP64_CHAIN, 1e-12),
        ("lamb", "fp32", LAYERWISE_CHAIN, 1e-5),
    ],
)
def test_a_chain_of_strategies_and_world_sizes(optimizer, precision, chain, tolerance, tmp_path):
    """Four steps on each."""
    words = (*TINY_GPT, *CHAIN_BATCH, f"--precision={precision}", "--optimizer.eps=1e-3")
    # The block is first updated on the third of the chain, in its second step, and has no states in two checkpoints.
    words = (*words, f"--optimizer.name={optimizer}", FASTER_BLOCK)
    assert run_interrupted(tmp_path / "whole", (*words, f"--train.stop_after_steps={4 * len(chain)}")) is None
    for number, (strategy, world_size) in enumerate(chain, 1):
        last = f"--train.stop_after_steps={4 * number}"
        assert run_interrupted(tmp_path / "chain", (*words, last), None, strategy, world_size) is None
    mine, theirs = ([line["loss"] for line in exact_log(tmp_path / name)] for name in ("chain", "whole"))
    assert mine == pytest.approx(theirs, rel=tolerance)
    assert_close_weights(tmp_path / "chain", tmp_path / "whole", tolerance)


def test_running_statistics_on_another_number_of_processes(tmp_path):
    """Each of two processes has its own when it is stopped between evaluations: one process gets their mean."""
    words = (*DIGITS_WORDS, "--precision=fp64", "--batch.micro_batch_size=8", "--train.stop_after_steps=9")
    assert run_interrupted(tmp_path / "whole", words, recipe=DIGITS) is None
    run_dir = tmp_path / "run"
    assert "exit code 75" in run_interrupted(run_dir, words, Interruption("signal", 1, 3), recipe=DIGITS)
    manifest = json.loads(next(run_dir.glob("checkpoints/*/manifest.json")).read_text())
    assert any(len(holders) == 2 for holders in manifest["buffers"].values())
    assert run_interrupted(run_dir, words, strategy="single", recipe=DIGITS) is None
    mine, theirs = (load_file(path / "model/model.safetensors") for path in (run_dir, tmp_path / "whole"))
    names = [name for name in theirs if "running" in name]
    assert names
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-11, atol=1e-13, err_msg=name)


def test_batch_sizes_that_are_past_limit_no_number_of_processes(tmp_path):
    """24 samples do not divide over 4 processes with 4 each, the 48 from step 9 on do."""

    def go_on(run_dir, last, world_size):
        return run_interrupted(
            run_dir, (*TINY_GPT, "--optimizer.eps=1e-3", f"--train.stop_after_steps={last}"), world_size=world_size
        )

    assert go_on(tmp_path / "whole", 11, 2) is None
    assert go_on(tmp_path / "run", 8, 2) is None
    refused = go_on(tmp_path / "run", 11, 4)
    assert "global_batch_size 24 is not a multiple of micro_batch_size x world_size = 4 x 4 = 16" in refused
    assert go_on(tmp_path / "run", 9, 2) is None
    assert go_on(tmp_path / "run", 11, 4) is None
    assert_close_weights(tmp_path / "run", tmp_path / "whole")
