"""A process that alone cannot read a checkpoint tells the others, which would wait for it in the engine."""

import os

import pytest

from jobs import failure_of, train, train_in_job
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def go_on_without_reading(run_dir):
    from largebatch.storage.layout import CheckpointError
    from largebatch.storage.tensors import TensorFiles

    def refuse(*_):
        raise CheckpointError("it cannot be read: Stale file handle")

    if os.environ["RANK"] == "1":
        TensorFiles.read_range = refuse
    train(PYDOC, *SMALL, "--train.stop_after_steps=2", run_dir=run_dir)


def test_every_process_ends_with_its_reason(run_dir):
    train_in_job(PYDOC, run_dir, *SMALL, "--train.stop_after_steps=1", strategy="zero3")
    report = failure_of(go_on_without_reading, run_dir, strategy="zero3")
    assert "on rank 1: " in report
    assert "it cannot be read: Stale file handle" in report
    assert "exit code 2" in report
    assert "Traceback" not in report
