"""A step that is not finite on one process, or spikes, is left out by all, as if it had never been there."""

import pytest
from test_not_finite import failure, train_poisoned

from jobs import run_job, train
from largebatch.storage.layout import read_object
from largebatch.storage.run_folder import RunFolder
from paths import DIGITS, MAPS, PYDOC
from resuming import TINY_GPT, TINY_MAPS, assert_same_weights, events, exact_log

pytestmark = pytest.mark.slow

# Steps 2 to 5 fill the window; the norms of so few steps may be alike. A planted spike is 1,000 times as large.
SPIKE = '--faults.spike={"window": 4, "sigmas": 100}'
OF_A_SPIKE = "standard deviations of the last 4 steps, at step 6"
WORDS = ("--train.stop_after_steps=10", '--checkpoint.every={"steps": 4}', '--evaluation.every={"steps": 7}')
TINY = {
    PYDOC: TINY_GPT,
    MAPS: TINY_MAPS,
    DIGITS: ("--logging.every=1", "--logging.trackers=[]", "--data.image_size=16"),
}


def train_without(run_dir, recipe, words, left_out):
    """The loop never sees these steps."""
    from largebatch.run import Run

    steps = Run.steps

    def some_steps(run, train_set):
        for step in steps(run, train_set):
            if step.index + 1 in left_out:
                list(step._feed.micro_steps)
                run.loop.recorder.step = step.index + 1
                run.loop.save_due = False
                step.updated = True
            else:
                yield step

    Run.steps = some_steps
    train(recipe, *words, run_dir=run_dir)


@pytest.mark.parametrize(
    ("policy", "recipe", "strategy", "where", "reason"),
    [
        ("skip", MAPS, "ddp", "gradient", "the gradient is not finite at step 6"),
        ("skip", DIGITS, "zero1", "loss", "on rank 1 at step 6"),
        ("roll_back", MAPS, "fsdp", "loss alone", "on rank 1 at step 6"),
        ("skip", PYDOC, "zero1", "spike", OF_A_SPIKE),
        ("roll_back", PYDOC, "zero3_offload", "spike", OF_A_SPIKE),
    ],
)
def test_as_if_the_steps_had_never_been(policy, recipe, strategy, where, reason, tmp_path):
    words = (*TINY[recipe], *WORDS, f"--faults.on_non_finite={policy}")
    words += (SPIKE,) if where == "spike" else ()
    # "roll_back" goes back to the checkpoint after step 4.
    left_out = {6} if policy == "skip" else {5, 6}
    run_job(train_poisoned, tmp_path / "poisoned", recipe, words, {6}, 1, where, strategy=strategy)
    run_job(train_without, tmp_path / "without", recipe, words, left_out, strategy=strategy)
    assert_same_weights(tmp_path / "poisoned/model", tmp_path / "without/model")
    losses = [{line["step"]: line["loss"] for line in exact_log(tmp_path / name)} for name in ("poisoned", "without")]
    # That of a step which is rolled back stays.
    assert losses[0].items() >= losses[1].items()
    assert 6 not in losses[0]
    (event,) = events(tmp_path / "poisoned", "skipped")
    assert (event["step"], event["first_skipped_step"]) == (6, min(left_out))
    assert event["bad_steps"] == 1
    assert reason in event["reason"]
    assert read_object(tmp_path / "poisoned/summary.json")["bad_steps"] == 1


OF_GPT = (*TINY_GPT, *WORDS)


def test_a_limit(run_dir):
    words = ("--faults.on_non_finite=skip", "--faults.max_bad_steps=2")
    report = failure(run_dir, *OF_GPT, *words, bad_steps={3, 6, 9})
    assert "3 such steps are more than faults.max_bad_steps 2" in report
    assert "at step 9" in report
    run = RunFolder(run_dir)
    assert (run.checkpoint_step(), run.ending().retry) == (8, False)
    assert [line["event"] for line in run.history()] == ["started", "skipped", "skipped", "failed"]


def test_a_spike_ends_a_run_that_shall_stop(run_dir):
    report = failure(run_dir, *OF_GPT, SPIKE, bad_steps={6}, where="spike")
    assert "steps, at step 6; training stopped before its update" in report
    assert (run_dir / "checkpoints/step_00000004").exists()
    assert not (run_dir / "checkpoints/step_00000008").exists()


def test_a_resumed_run_compares_with_the_norms_before(run_dir):
    """The window is filled by one strategy; the first step after the resume spikes on another."""
    words = (*OF_GPT, "--faults.on_non_finite=skip", SPIKE)
    run_job(train_poisoned, run_dir, PYDOC, (*words, "--train.stop_after_steps=5"), {6}, 0, "spike")
    run_job(train_poisoned, run_dir, PYDOC, words, {6}, 0, "spike", strategy="zero2")
    assert [event["step"] for event in events(run_dir, "skipped")] == [6]


def test_nothing_to_roll_back_to(run_dir):
    report = failure(run_dir, *OF_GPT, "--faults.on_non_finite=roll_back", bad_steps={3})
    assert "no checkpoint can be restored (none has been written yet)" in report


def train_poisoned_and_damaged(run_dir, words):
    """The checkpoint of step 8 is damaged before step 10 is left out."""
    from largebatch.run import Run

    update = Run.update

    def damage_and_update(run, step):
        if step.index == 9:
            run.loop.writer.wait()
            if run.backend.is_main_process:
                file = run_dir / "checkpoints/step_00000008/rank_00000.safetensors"
                file.write_bytes(bytes(file.stat().st_size))
            run.backend.accelerator.wait_for_everyone()
        update(run, step)

    Run.update = damage_and_update
    train_poisoned(run_dir, PYDOC, words, {10}, 1, "loss")


def test_a_damaged_checkpoint_is_not_rolled_back_to(tmp_path):
    run_job(train_poisoned_and_damaged, tmp_path, (*OF_GPT, "--faults.on_non_finite=roll_back"))
    (event,) = events(tmp_path, "skipped")
    assert (event["first_skipped_step"], event["step"]) == (5, 10)


def test_a_checkpoint_never_holds_what_is_not_finite(run_dir):
    """The gradient of step 4 is not finite, and no step is logged but the first: the checkpoint is not written."""
    words = (*OF_GPT, "--logging.every=100", "--optimizer.clip_norm=null")
    assert "the gradient's norm is" in failure(run_dir, *words, bad_steps={4}, where="gradient")
    assert not list(run_dir.glob("checkpoints/step_*"))
