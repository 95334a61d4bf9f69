"""A process that alone cannot read a checkpoint tells the others, which would wait for it in the engine."""

import os

import pytest

from jobs import JobFailed, run_job, train
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def train_one_step(run_dir):
    train(PYDOC, *SMALL, "--train.stop_after_steps=1", run_dir=run_dir)


def go_on_without_reading(run_dir):
    from largebatch.storage.layout import CheckpointError
    from largebatch.storage.tensors import TensorFiles

    def refuse(*_):
        raise CheckpointError("it cannot be read: Stale file handle")

    if os.environ["RANK"] == "1":
        TensorFiles.read_range = refuse
    train(PYDOC, *SMALL, "--train.stop_after_steps=2", run_dir=run_dir)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_every_process_ends_with_its_reason(strategy, tmp_path):
    run_job(train_one_step, tmp_path / "run", strategy=strategy)
    with pytest.raises(JobFailed) as failure:
        run_job(go_on_without_reading, tmp_path / "run", strategy=strategy)
    report = str(failure.value)
    assert "on rank 1: " in report
    assert "it cannot be read: Stale file handle" in report
    assert "exit code 2" in report
    assert "Traceback" not in report
