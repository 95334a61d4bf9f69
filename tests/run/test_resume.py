"""A run that was interrupted ends as one that was not."""

import json
import re
import shutil
import time

import pytest

from failing_files import FileSystem, Moment, run
from jobs import run_job, train, write_zero_config
from largebatch.errors import StorageError
from largebatch.run.checkpoint.export import export
from largebatch.storage.layout import MANIFEST, folder_name
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
    stop_and_resume,
)

pytestmark = pytest.mark.slow

LARS = '--optimizer={"name": "lars", "weight_decay": 0.001}'
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
    ("words", "kind", "told", "place"),
    [
        (TINY_GPT, "signal", "SIGUSR1", {"recipe": PYDOC, "strategy": "fsdp", "world_size": 3}),
        ((*DIGITS_WORDS, LARS), "stop file", "by the stop file", {"recipe": DIGITS, "strategy": "zero1"}),
    ],
)
def test_stopped_and_resumed_bit_for_bit(words, kind, told, place, run_dir):
    """Within an epoch, between evaluations and log points.

    ZeRO-2 is killed below, one process stops in `test_start.py`, and ZeRO-3 in `tests/recipes`
    and `tests/model`. GPT has AdamW, and the digits LARS.
    """
    stop_and_resume(run_dir.parent, (*words, "--train.stop_after_steps=13"), Interruption(kind, 1, 3), **place)
    assert_bit_for_bit(run_dir, run_dir.with_name("whole"))
    history = RunFolder(run_dir).history()
    # Noted in step 3, agreed on in step 4.
    expected = [("started", 0), ("stopped", 4), ("started", 4), ("finished", 13)]
    assert [(line["event"], line["step"]) for line in history] == expected
    assert told in history[1]["message"]
    assert not (run_dir / "stop").exists()


def test_killed_and_resumed_bit_for_bit(run_dir):
    """`checkpoint/test_every_step_of_a_save.py` kills at each step of a save."""
    words = (*TINY_GPT, "--train.stop_after_steps=14", '--checkpoint.every={"steps": 4}')
    stop_and_resume(run_dir.parent, words, Interruption("kill", 1, 7), strategy="zero2")
    assert_bit_for_bit(run_dir, run_dir.with_name("whole"))


LAMB_CHAIN = (*TINY_GPT, *CHAIN_BATCH, FASTER_BLOCK, "--optimizer.eps=1e-3", "--optimizer.name=lamb")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run of LAMB on one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    words = (*LAMB_CHAIN, "--train.stop_after_steps=20", '--checkpoint.every={"steps": 6}')
    assert run_interrupted(run_dir, (*words, "--checkpoint.keep_last=null"), strategy="single") is None
    return run_dir


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (2, {"round_robin_gradients": True}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
        (3, {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}),
    ],
)
def test_settings_of_deepspeed_that_lay_out_its_state_otherwise(stage, settings, alone, run_dir, tmp_path):
    """LAMB finds its layers in them, and a run is resumed."""
    write_zero_config(tmp_path, stage, settings)
    place = {"strategy": f"zero{stage}", "world_size": 3, "accelerate_configs": tmp_path}
    for last in (3, 6):
        words = (*LAMB_CHAIN, f"--train.stop_after_steps={last}")
        assert run_interrupted(run_dir, words, **place) is None
    export(alone / "checkpoints" / folder_name(6), tmp_path / "alone/model")
    assert_close_weights(run_dir, tmp_path / "alone")


def train_with_slow_copies(run_dir, words):
    """The copy of the state that is to be saved begins when the next step's gradients are there already."""
    from largebatch.run.checkpoint.save import CheckpointWriter

    copy = CheckpointWriter._copy
    CheckpointWriter._copy = lambda *arguments: time.sleep(0.5) or copy(*arguments)
    train(PYDOC, *words, run_dir=run_dir)


def test_updates_wait_for_the_copy(run_dir, tmp_path):
    words = (*TINY_GPT, '--checkpoint.every={"steps": 3}', "--checkpoint.keep_last=null", "--train.stop_after_steps=8")
    run_job(train_with_slow_copies, run_dir, words, strategy="fsdp")
    again = (*words, "--resume", str(run_dir / "checkpoints/step_00000003"))
    assert run_interrupted(tmp_path / "again", again, strategy="fsdp") is None
    assert_same_weights(tmp_path / "again/model", run_dir / "model")


# --- other strategies and numbers of processes --------------------------------------------------------------------


def test_a_chain_of_strategies_and_world_sizes(alone, run_dir):
    """Four steps on each; `tests/test_outside_task.py` has samples of unequal weight, and ragged batches."""
    chain = [("zero3", 3), ("hsdp", 4), ("zero1", 1), ("zero2", 2), ("fsdp", 2)]
    for number, (strategy, world_size) in enumerate(chain, 1):
        words = (*LAMB_CHAIN, f"--train.stop_after_steps={4 * number}")
        assert run_interrupted(run_dir, words, strategy=strategy, world_size=world_size) is None
    mine, theirs = ([line["loss"] for line in exact_log(folder)] for folder in (run_dir, alone))
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert_close_weights(run_dir, alone)


def test_running_statistics_on_another_number_of_processes(run_dir, tmp_path):
    """Each of two processes has its own when it is stopped between evaluations: one process gets their mean.

    What fp64 adds to fp32 would be lost in a checkpoint of less.
    """
    words = (*DIGITS_WORDS, "--precision=fp64", "--batch.micro_batch_size=8", "--train.stop_after_steps=9")
    assert run_interrupted(tmp_path / "whole", words, recipe=DIGITS) is None
    assert "exit code 75" in run_interrupted(run_dir, words, Interruption("signal", 1, 3), recipe=DIGITS)
    manifest = json.loads(next(run_dir.glob("checkpoints/*/manifest.json")).read_text())
    assert any(len(holders) == 2 for holders in manifest["buffers"].values())
    assert run_interrupted(run_dir, words, strategy="single", recipe=DIGITS) is None
    assert_close_weights(run_dir, tmp_path / "whole", 1e-11)


def test_batch_sizes_that_are_past_limit_no_number_of_processes(run_dir):
    """24 samples do not divide over 4 processes with 4 each, the 48 from step 9 on do."""
    renamed = run_dir.parent / "renamed"
    for last, world_size, options in ((9, 2, ()), (11, 4, ()), (11, 4, ("--resume", str(renamed)))):
        words = (*TINY_GPT, f"--train.stop_after_steps={last}", *options)
        place = run_dir.parent / "again" if options else run_dir
        assert run_interrupted(place, words, world_size=world_size) is None
        if last == 9:
            shutil.copytree(run_dir / "checkpoints" / folder_name(9), renamed)


def test_a_checkpoint_that_cannot_be_read_now(run_dir, tmp_path):
    """Processes that took it for none would plan something else than those that can read it."""
    (tmp_path / MANIFEST).write_text("{}")
    files = FileSystem(tmp_path, Moment("open", MANIFEST, "largebatch.system.regular_file._open_at_once"))
    code, text = run_job(run, run_dir, (*TINY_GPT, f"--resume={tmp_path}"), files, strategy="single")[0]
    assert code == StorageError.exit_code
    assert re.search(r"--resume: .* cannot be read: .*Input/output error.*; the same command tries again", text)
