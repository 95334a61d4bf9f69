"""While a checkpoint is written training goes on, and changes nothing of it."""

import threading

import pytest
import torch

from largebatch.errors import TrainingFailed
from largebatch.storage.attempts import Attempt
from saving import FakeRun, usable


class Gate:
    """Holds the writing of checkpoints up until it is opened."""

    def __init__(self, monkeypatch):
        self.reached = threading.Event()
        self.open = threading.Event()
        monkeypatch.setattr(Attempt, "check", lambda _: self.reached.set() or self.open.wait(600))


def test_a_checkpoint_is_the_state_at_the_time_it_was_asked_for(run_dir, monkeypatch):
    gate = Gate(monkeypatch)
    run = FakeRun(run_dir, asynchronous=True)
    run.begin_to_save(4)
    run.writer.wait_until_copied()
    for tensor in run.backend.state.values():
        tensor.zero_()
    assert gate.reached.wait(600)
    run.writer.poll()
    assert (run.writer.last_step, usable(run.checkpoints)) == (0, [])
    gate.open.set()
    run.writer.wait()
    assert run.writer.last_step == 4
    assert usable(run.checkpoints) == [4]


def test_the_next_save_waits_for_the_one_before(run_dir, monkeypatch):
    gate = Gate(monkeypatch)
    run = FakeRun(run_dir, asynchronous=True)
    run.begin_to_save(4)
    timer = threading.Timer(0.2, gate.open.set)
    timer.start()
    run.begin_to_save(8)
    assert run.writer.last_step == 4
    run.writer.wait()
    assert run.writer.last_step == 8
    assert run.writer.poll() == [4, 8]
    assert run.writer.poll() == []
    assert usable(run.checkpoints) == [8, 4]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_stored_ends_the_run_and_leaves_the_older_checkpoint(asynchronous, run_dir):
    run = FakeRun(run_dir, asynchronous=asynchronous)
    run.save(4)
    run.backend.state["buffer/mask"] = torch.ones(2, dtype=torch.complex64)
    if asynchronous:
        run.writer.save(8, {})
    with pytest.raises(TrainingFailed, match="the checkpoint could not be written: KeyError"):
        run.writer.wait() if asynchronous else run.writer.save(8, {})
    assert usable(run.checkpoints) == [4]
    assert run.warnings == []
    assert len(list(run.checkpoints.iterdir())) == 1
