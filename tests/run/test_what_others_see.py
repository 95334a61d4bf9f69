"""Checkpoints that one process sees later than the main process, or not at all, as on NFS."""

from types import SimpleNamespace

import pytest

from largebatch.backend.processes import Processes
from largebatch.errors import StorageError, UserError
from largebatch.run import resume
from largebatch.storage.catalog import entries
from saving import make_checkpoint

# What the other process says of a checkpoint that is intact for it: that it is there, and seen; no error; no problem.
INTACT = [True, True, None, (None, False)]
GONE = [True, False, None, ("there is no such folder", False)]


class OneOfTwo:
    """One of two processes; `other` is what the other one gathers."""

    raise_on_all_ranks = Processes.raise_on_all_ranks
    world_size = 2

    def __init__(self, rank, other):
        self.rank = rank
        self._other = iter(other)

    def gather_objects(self, value, _group=None):
        return [value, next(self._other)] if self.rank == 0 else [next(self._other), value]


@pytest.fixture
def latest(tmp_path, monkeypatch):
    """The checkpoint that a process takes, if it sees the newest after so many seconds."""
    for step in (1, 2):
        make_checkpoint(tmp_path / f"step_{step:08d}")
    candidates = [entry.path for entry in entries(tmp_path)]
    newest = tmp_path / "step_00000002"
    hidden = newest.rename(tmp_path / "hidden")
    now = [0.0]

    def found(seconds, *other):
        def sleep(duration):
            now[0] += duration
            if now[0] == seconds:
                hidden.rename(newest)

        monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        monkeypatch.setattr(resume, "read_manifest", lambda path: path)
        (path, _), _ = resume.latest_usable(candidates, OneOfTwo(1, other))
        return path.name

    return found


def test_one_that_a_process_sees_later(latest):
    assert latest(20, *INTACT) == "step_00000002"


def test_one_that_another_process_never_sees(latest):
    """The older one is not taken in its place: the newest would be set aside."""
    with pytest.raises(UserError, match=r"on rank 1: .*no such folder, but the main process sees the whole") as caught:
        latest(None, *INTACT)
    assert caught.value.exit_code == StorageError.exit_code


def test_one_that_is_gone_for_all(latest):
    assert latest(None, *GONE, *INTACT) == "step_00000001"
