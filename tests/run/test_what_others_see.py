"""Checkpoints that one process sees later than the main process, or not at all, as on NFS."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from largebatch.backend.processes import Processes
from largebatch.errors import StorageError, UserError
from largebatch.run import resume
from largebatch.storage.catalog import entries, entry_at
from saving import make_checkpoint


class Backend:
    """One of two processes, which are threads here."""

    raise_on_all_ranks = Processes.raise_on_all_ranks
    world_size = 2

    def __init__(self, rank, barrier, values):
        self.rank = rank
        self._barrier = barrier
        self._values = values

    def gather_objects(self, value):
        self._values[self.rank] = value
        self._barrier.wait(10)
        found = [*self._values]
        self._barrier.wait(10)
        return found


@pytest.fixture
def latest(tmp_path, monkeypatch):
    """What both processes find, or their errors, if they do not see the newest for a number of looks."""
    for step in (1, 2):
        make_checkpoint(tmp_path / f"step_{step:08d}")
    monkeypatch.setattr(resume, "read_manifest", lambda path: SimpleNamespace(path=path))
    of_thread = threading.local()

    def sleep(seconds):
        of_thread.now += seconds

    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: of_thread.now, sleep=sleep))

    def look(path):
        left = of_thread.left
        of_thread.left = left - 1 if path.name == "step_00000002" else left
        return entry_at(path if path.name != "step_00000002" or left <= 0 else path.with_name("step_00000003"))

    monkeypatch.setattr(resume, "entry_at", look)

    def found(*unseen):
        barrier = threading.Barrier(2)
        values = [None, None]

        def on_one(rank):
            of_thread.now = 0.0
            of_thread.left = unseen[rank]
            try:
                usable, _ = resume.latest_usable(entries(tmp_path), Backend(rank, barrier, values))
            except UserError as error:
                return error
            return usable[0].name

        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(on_one, range(2))]

    return found


def test_one_that_another_process_sees_later(latest):
    assert [latest(0, 0), latest(0, 40), latest(40, 0)] == [["step_00000002"] * 2] * 3


def test_one_that_another_process_never_sees(latest):
    """The older one is not taken in its place: the newest would be set aside."""
    for error in latest(0, 10**9):
        assert error.exit_code == StorageError.exit_code
        assert "on rank 1: " in str(error)
        assert "step_00000002: there is no such folder, but the main process sees the whole checkpoint; the" in str(
            error
        )


def test_one_that_is_gone_for_all(latest):
    assert latest(10**9, 10**9) == ["step_00000001"] * 2
