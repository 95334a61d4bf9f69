"""A disk that is full for a while costs checkpoints and nothing else."""

import pytest

from disks import fill, small_disk
from jobs import run_job, train
from largebatch.storage.files import read_json_lines
from paths import PYDOC
from resuming import TINY_GPT, events, logged_steps

pytestmark = [pytest.mark.slow, pytest.mark.root]

WORDS = (*TINY_GPT, '--checkpoint.every={"steps": 2}', "--train.stop_after_steps=14")


def train_on_a_full_disk(run_dir, words):
    """The disk is full from step 5 to step 9."""
    from largebatch.run import Run

    update = Run.update
    filler = []

    def fill_and_update(run, step):
        if step.index == 4 and run.backend.is_main_process:
            filler.append(fill(run_dir.parent))
        if step.index == 9:
            # That of step 8.
            run.loop.writer.wait()
            for file in filler:
                file.unlink()
        update(run, step)

    Run.update = fill_and_update
    train(PYDOC, *words, run_dir=run_dir)


def test_training_goes_on_and_nothing_is_lost(tmp_path):
    words = (*WORDS, '--logging.trackers=["tensorboard"]')
    with small_disk(tmp_path / "disk", megabytes=4) as disk:
        run_dir = disk / "run"
        run_job(train_on_a_full_disk, run_dir, words, strategy="zero2")
        assert sorted(path.name for path in run_dir.glob("checkpoints/*")) == ["step_00000012", "step_00000014"]
        failed = [line["step"] for line in events(run_dir, "checkpoint_failed")]
        # That of step 4 was being written when the disk became full.
        assert failed in ([6, 8], [4, 6, 8])
        assert logged_steps(run_dir) == list(range(1, 15))
        assert [line["step"] for line in read_json_lines(run_dir / "evaluations.jsonl")] == [5, 10, 14]
