"""Work in the background that others wait for: a sign of life as long as any process proceeds, and none otherwise."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from largebatch.run.watch import waiting
from largebatch.run.watch.waiting import in_thread, wait_together


@pytest.mark.parametrize(("proceeds", "is_alive"), [(True, True), (False, False)])
def test_all_live_as_long_as_one_proceeds(proceeds, is_alive, monkeypatch):
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_ROUNDS", 0.1)
    numbers = {}
    met = threading.Barrier(2)

    def all_max(number):
        numbers[threading.current_thread()] = number
        met.wait()
        largest = max(numbers.values())
        met.wait()
        return lambda: largest

    def work():
        for _ in range(100):
            time.sleep(0.01)
            if proceeds:
                progress.set()

    def wait(rank):
        beats = []
        wait_together(SimpleNamespace(all_max=all_max), lambda: beats.append(rank), works[rank], progress)
        return beats

    progress = threading.Event()
    works = (in_thread("work", work), None)
    with ThreadPoolExecutor(2) as pool:
        busy, idle = pool.map(wait, range(2))
    assert len(busy) == len(idle)
    # The last one says that all is done.
    assert (len(busy) > 3) == is_alive
    assert works[0].done()


def test_what_the_work_raises_is_its_result():
    def fail():
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        in_thread("work", fail).result()
