"""Work in the background that others wait for: a sign of life as long as any process proceeds, and none otherwise."""

import threading
import time
from types import SimpleNamespace

import pytest

from largebatch.run.watch import waiting
from largebatch.run.watch.waiting import DONE, PROCEEDS, STALLED, in_thread, wait_together


def heartbeats(work, progress, all_max):
    beats = []
    wait_together(SimpleNamespace(all_max=all_max), lambda: beats.append("beat"), work, progress)
    return len(beats)


@pytest.mark.parametrize("proceeds", [True, False])
def test_who_works_lives_as_long_as_the_work_proceeds(proceeds, monkeypatch):
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_ROUNDS", 0.1)
    progress = threading.Event()

    def work():
        for _ in range(100):
            time.sleep(0.01)
            if proceeds:
                progress.set()

    # The last one says that all is done.
    assert (heartbeats(in_thread("work", work), progress, lambda number: lambda: number) > 3) == proceeds


def test_who_has_no_work_lives_as_long_as_another_proceeds():
    others = iter([PROCEEDS, STALLED, PROCEEDS, DONE])
    assert heartbeats(None, threading.Event(), lambda number: lambda: max(number, next(others))) == 3


def test_what_the_work_raises_is_its_result():
    def fail():
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        in_thread("work", fail).result()
