"""Which run a start goes on with, what it refuses, and what becomes of two at once."""

import io
import os
import shutil
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch

import tasks
from jobs import run_job, train
from largebatch.config import as_json, load_config
from largebatch.config.differences import differences
from largebatch.errors import UserError
from largebatch.run import Run
from largebatch.run.record.folder import OwnFolder
from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from paths import DIGITS, PYDOC, SIMCLR
from resuming import (
    CHAIN_BATCH,
    TINY_GPT,
    Interruption,
    assert_same_weights,
    events,
    logged_steps,
    run_interrupted,
)

pytestmark = pytest.mark.slow

WORDS = (*TINY_GPT, *CHAIN_BATCH, '--train.duration={"steps": 12}', "--learning_rate.warmup=null")


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A run of 12 steps that was stopped after step 4."""
    run_dir = tmp_path_factory.mktemp("half") / "run"
    assert "exit code 75" in run_interrupted(run_dir, WORDS, Interruption("signal", 0, 3), strategy="single")
    assert not (run_dir / "model").exists()
    return run_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, which was not stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert resume(run_dir) is None
    return run_dir


def resume(run_dir, *options, **place):
    return run_interrupted(run_dir, (*WORDS, *options), strategy="single", **place)


def refusal(run_dir, *options):
    report = resume(run_dir, *options)
    assert "exit code 2" in report
    assert "Traceback" not in report
    return report


def content_of(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.fixture
def run_dir(half_done, tmp_path):
    """A copy of it."""
    return shutil.copytree(half_done, tmp_path / "run")


def test_what_changes_the_training_is_refused_with_the_differences(run_dir):
    before = content_of(run_dir)
    changes = {
        "batch.global_batch_size": (48, 24),
        "batch.micro_batch_size": (4, 8),
        "data.num_train_samples": (600, 500),
        "learning_rate.base_lr": (0.002, 0.1),
        "precision": ('"fp32"', '"fp64"'),
        "seed": (0, 7),
        "train.duration.steps": (12, 20),
    }
    options = [f"--{name}={now}" for name, (_, now) in changes.items()]
    report = refusal(run_dir, *options, "--allow-change", "seed")
    del changes["seed"]
    for name, (before_it, now) in changes.items():
        assert f"\n  - {name}: {before_it} in the checkpoint, {now} now\n" in report
    assert f"--allow-change seed,{','.join(changes)} resumes with the change" in report
    assert content_of(run_dir) == before


def test_synchronized_batch_norm_needs_the_same_samples_together(tmp_path):
    """However they are divided: 16 of one process are 8 of each of two."""
    words = ("--model.sync_batch_norm=true", "--logging.trackers=[]", "--train.stop_after_steps=4")
    words += ("--data.image_size=16", "--evaluation.max_samples=16")

    def start(micro_batch_size, interruption=None, **place):
        options = (*words, f"--batch.micro_batch_size={micro_batch_size}")
        return run_interrupted(tmp_path / "run", options, interruption, recipe=DIGITS, **place)

    assert "exit code 75" in start(16, Interruption("signal", 0, 1), strategy="single")
    line = 'model.sync_batch_norm: "over 16 samples" in the checkpoint, "over {} samples" now'
    assert line.format(32) in start(16)
    assert start(8) is None
    assert logged_steps(tmp_path / "run")[-1] == 4


def test_an_allowed_change_is_made_and_written_down(run_dir):
    """And what becomes of the samples, where the batch is another one."""
    options = ("--optimizer.clip_norm=0.5", "--learning_rate.base_lr=0.001", "--batch.global_batch_size=24")
    report = resume(run_dir, *options, "--allow-change", "optimizer.clip_norm")
    assert "learning_rate.base_lr: 0.002 in the checkpoint" in report
    assert "optimizer.clip_norm: " not in report
    allow = ("--allow-change", "optimizer.clip_norm,learning_rate,batch")
    assert resume(run_dir, *options, *allow) is None
    assert read_json_lines(run_dir / "metrics.jsonl")[-1]["lr"] < 0.001
    started = events(run_dir, "started")[-1]
    assert started["changes"] == [
        "batch.global_batch_size: 48 in the checkpoint, 24 now",
        "learning_rate.base_lr: 0.002 in the checkpoint, 0.001 now",
        "optimizer.clip_norm: 1.0 in the checkpoint, 0.5 now",
        "step 4 came after 192 samples and comes after 96 now: 96 samples are repeated",
    ]
    assert Path(started["recipe"]).name == "gpt_pydoc.json"
    # A wheel's metadata may leave out what it was built for, as in 2.13.0+cu130.
    assert torch.__version__.startswith(started["versions"]["torch"])


def test_what_does_not_change_the_training_may_change(run_dir, whole):
    options = (
        "--logging.every=3",
        "--evaluation.max_samples=8",
        "--checkpoint.keep_last=1",
        "--faults.hang_seconds=900",
        "--compute.activation_checkpointing=full",
        "--data.num_workers=1",
        '--debug_model={"num_layers": 1}',
    )
    assert resume(run_dir, *options) is None
    assert RunFolder(run_dir).history()[-1]["step"] == 12
    assert_same_weights(run_dir / "model", whole / "model")


def train_where_one_sees_the_folder_late(run_dir):
    if os.environ["RANK"] == "1":
        OwnFolder.is_a_run = property(lambda _: False)
        OwnFolder.check_usable = lambda _: None
    train(PYDOC, *WORDS, run_dir=run_dir)


def test_the_main_process_decides_what_is_in_the_folder(run_dir):
    run_job(train_where_one_sees_the_folder_late, run_dir)
    assert logged_steps(run_dir) == list(range(1, 13))


def test_none_begins_anew_and_moves_the_earlier_run_aside(run_dir):
    assert resume(run_dir, "--resume", "none", "--seed=7", "--train.stop_after_steps=2") is None
    assert logged_steps(run_dir) == [1, 2]
    assert len(read_json_lines(run_dir.with_name("run.1") / "metrics.jsonl")) == 4


def test_how_features_are_judged_may_change():
    """The neighbors of contrastive recipes are an evaluation, and their loss is not."""
    before = as_json(load_config(SIMCLR))
    changed = load_config(SIMCLR, ["--neighbors.count=7", "--loss.temperature=0.3"])
    assert list(differences(before, changed)) == ["loss.temperature"]


def output_of_training(run_dir, *words):
    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
        train(PYDOC, *WORDS, *words, run_dir=run_dir)
    return output.getvalue()


def test_a_finished_run_is_left_as_it_is_unless_it_shall_go_on_or_is_of_another_recipe(run_dir, whole):
    early = "--train.stop_after_steps=6"
    assert resume(run_dir, early) is None
    before = content_of(run_dir)
    (output,) = run_job(output_of_training, run_dir, early, strategy="single")
    assert "is finished, after step 6 of 12; raise train.stop_after_steps to train longer" in output
    assert content_of(run_dir) == before
    kept = (run_dir / "checkpoints").rename(run_dir.with_name("checkpoints"))
    (output,) = run_job(output_of_training, run_dir, early, strategy="single")
    assert "is finished, after step 6 of 12" in output
    assert "was trained to step 6, but has no checkpoint any more; put it back, or start over with" in refusal(run_dir)
    kept.rename(run_dir / "checkpoints")
    assert resume(run_dir) is None
    assert_same_weights(run_dir / "model", whole / "model")
    changed = ("--seed=7", "--train.stop_after_steps=2")
    (output,) = run_job(output_of_training, run_dir, *changed, strategy="single")
    assert f"was moved to {run_dir}.1; its recipe differs:\n  - seed: 0 in the checkpoint, 7 now\n" in output
    assert (run_dir.with_name("run.1") / "model/model.safetensors").exists()


def test_a_task_of_another_name_is_another_recipe(tmp_path):
    other = tasks.copy("causal_lm", tmp_path).rename(tmp_path / "other_lm") / PYDOC.name
    found = differences(as_json(load_config(PYDOC)), load_config(other))
    assert found == {"task": ("causal_lm", "other_lm")}


@pytest.mark.parametrize(("kind", "found"), [("blocks", []), ("documents", ["data.samples"])])
def test_runs_from_when_samples_were_blocks_or_documents(kind, found):
    config = load_config(PYDOC)
    before = as_json(config)
    before["data"]["samples"] = kind
    assert list(differences(before, config)) == found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--train.stop_after_steps=3"], "the checkpoint is of step 4, but the run would end after step 3 (of 12)"),
        (["--resume", "/nowhere"], "error: --resume: /nowhere: there is no such folder"),
        (
            ["--model.num_heads=4", "--model.hidden_size=32", "--allow-change", "model"],
            "its parameter transformer.wte.weight is of shape (256, 16), but the model's is of shape (256, 32)",
        ),
    ],
)
def test_a_checkpoint_that_the_run_cannot_begin_with(options, said, run_dir):
    assert said in refusal(run_dir, *options)


def test_damage_to_all_checkpoints_is_refused(run_dir):
    (file,) = run_dir.glob("checkpoints/step_00000004/rank_*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    before = content_of(run_dir)
    report = refusal(run_dir)
    assert "has checkpoints, but none of them can be used" in report
    assert "step_00000004: rank_00000.safetensors has" in report
    assert content_of(run_dir) == before


def test_a_run_without_its_checkpoints_does_not_start_over(run_dir):
    assert run_interrupted(run_dir, WORDS, Interruption("kill", 0, 6), strategy="single")
    shutil.rmtree(run_dir / "checkpoints")
    before = content_of(run_dir)
    report = run_interrupted(run_dir, WORDS)
    assert "exit code 2" in report
    assert "was trained to step 4, but has no checkpoint any more; put it back" in report
    assert content_of(run_dir) == before


def leave_the_loop(run_dir):
    """A start of another run is tried in the first step."""
    steps = Run.steps

    def some_steps(run, train_set):
        for step in steps(run, train_set):
            if step.index == 0 and run.backend.is_main_process:
                with pytest.raises(UserError, match="another run is writing to"):
                    OwnFolder(run_dir).hold()
            if step.index == 6:
                return
            yield step

    Run.steps = some_steps
    train(PYDOC, *WORDS, run_dir=run_dir)


def test_a_loop_that_is_left_early_keeps_others_out_and_has_a_checkpoint_of_its_end(tmp_path):
    run_job(leave_the_loop, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert [(line["event"], line["step"]) for line in run.history()] == [("started", 0), ("finished", 6)]
    assert run.checkpoint_step() == 6


def test_a_path_begins_another_run_or_goes_back(run_dir, whole, tmp_path):
    checkpoint = run_dir / "checkpoints/step_00000004"
    assert resume(run_dir) is None
    other = tmp_path / "other"
    assert resume(other, "--resume", str(checkpoint)) is None
    assert logged_steps(other) == list(range(5, 13))
    # Back to step 4 of the same run: later checkpoints are kept aside.
    assert resume(run_dir, "--resume", f"{run_dir}/checkpoints/../checkpoints/{checkpoint.name}") is None
    assert logged_steps(run_dir) == list(range(1, 13))
    assert list(run_dir.glob("checkpoints/set_aside_by_attempt_0003_*/step_00000012/complete.json"))
    for path in (other, run_dir):
        assert_same_weights(path / "model", whole / "model")


def test_a_damaged_checkpoint_is_skipped_and_named(run_dir, whole):
    assert resume(run_dir, "--train.stop_after_steps=8") is None
    (file,) = run_dir.glob("checkpoints/step_00000008/rank_*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    assert resume(run_dir) is None
    assert_same_weights(run_dir / "model", whole / "model")
    started = events(run_dir, "started")[-1]
    assert started["step"] == 4
    assert "its checksum differs" in started["checkpoints_not_used"][0]
