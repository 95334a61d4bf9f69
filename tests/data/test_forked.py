"""Work that is shared by forked processes: what ends them is told, and they end when this process does."""

import contextlib
import gc
import os
import signal
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from multiprocessing.util import register_after_fork

import pytest
from torch.multiprocessing import ProcessRaisedException

from largebatch.data.forked import run_forked
from largebatch.errors import DataError, StorageError
from processes import children_of, is_running, state_of


def test_each_item_is_worked_on_once(tmp_path):
    run_forked(3, lambda item: (tmp_path / str(item)).touch(exist_ok=False), range(10))
    assert {path.name for path in tmp_path.iterdir()} == {str(item) for item in range(10)}


def test_what_the_parent_has_left_is_not_destroyed_in_a_process():
    """Some libraries' objects abort if they are, because their threads are not there; any allocation may do it."""
    parent = os.getpid()

    class Left:
        def __init__(self):
            self.itself = self

        def __del__(self):
            if os.getpid() != parent:
                os.abort()

    gc.disable()
    try:
        left = Left()
        # Before a process of `multiprocessing` comes to its work.
        register_after_fork(collect := partial(lambda *_: gc.collect()), collect)
        del left
        run_forked(1, collect, [0])
    finally:
        gc.enable()
        # What is left would abort the processes of later tests.
        gc.collect()


def wait_for(is_true, seconds):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_gets_no_time_ends_with_its_parent_too():
    def stop(_):
        os.kill(os.getpid(), signal.SIGSTOP)

    parent = get_context("fork").Process(target=run_forked, args=(1, stop, [0]))
    parent.start()
    wait_for(lambda: children_of(parent.pid), 60)
    (process,) = children_of(parent.pid)
    wait_for(lambda: state_of(process) == "T", 60)
    parent.kill()
    parent.join()
    try:
        wait_for(lambda: not is_running(process), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_a_process_that_is_killed_is_told():
    def work(item):
        if item == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match=r"ended with exit code -9, perhaps for lack of memory; write fewer --workers"):
        run_forked(2, work, range(4))


@pytest.mark.parametrize("seconds", [0.0, 0.05])
@pytest.mark.parametrize(
    ("error", "raised"), [(ZeroDivisionError, ProcessRaisedException), (StorageError, StorageError)]
)
def test_an_error_in_a_process_is_told(error, raised, seconds, monkeypatch):
    """Also where all processes have ended before they are looked at."""
    start = ForkProcess.start
    monkeypatch.setattr(ForkProcess, "start", lambda process: (start(process), time.sleep(seconds)))

    def work(item):
        raise error(f"no room for {item}")

    with pytest.raises(raised, match="no room for "):
        run_forked(2, work, range(4))
