"""Lines that wait for others are written when the run fails, but not into a later attempt's files."""

import pytest
import torch

from largebatch.storage.attempts import claim
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import OwnEnding
from recording import begin

STEPS = 20


@pytest.fixture
def now(monkeypatch):
    time = [100.0]
    monkeypatch.setattr("largebatch.run.record.journal.time.monotonic", lambda: time[0])
    return time


def measure(recorder, step):
    parts = [(0.5, torch.tensor(2.0))] * 2
    recorder.noise_scale.add(step, parts, torch.tensor(3.0))
    recorder.noise_scale.complete()


def test_lines_of_less_than_a_second_are_written_together(now, tmp_path):
    recorder = begin(tmp_path, OwnEnding())
    folder = RunFolder(tmp_path)
    written = []
    for step in range(1, 6):
        measure(recorder, step)
        written.append(len(folder.noise_scale()))
        now[0] += 0.4
    assert written == [1, 1, 1, 4, 4]
    recorder.flush()
    assert len(folder.noise_scale()) == 5


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize("is_later_attempt", [False, True])
def test_a_run_that_fails(is_later_attempt, tmp_path):
    ending = OwnEnding()
    recorder = begin(tmp_path, ending)
    for step in range(1, STEPS + 1):
        measure(recorder, step)
    folder = RunFolder(tmp_path)
    assert len(folder.noise_scale()) == 1
    if is_later_attempt:
        claim(folder.attempts_dir, {})
    ending.fail(KeyError("of the main process"))
    assert len(folder.noise_scale()) == (1 if is_later_attempt else STEPS)
    assert [line["event"] for line in folder.history()] == (["started"] if is_later_attempt else ["started", "failed"])
