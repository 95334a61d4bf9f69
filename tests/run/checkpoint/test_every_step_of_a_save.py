"""A process may die at every single step of a save: a complete checkpoint is always left, and training can go on."""

import errno
import os
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from largebatch.errors import TrainingFailed
from largebatch.storage.attempts import claim
from processes import forked
from saving import FakeRun, assert_holds, assert_training_goes_on, temporary_folders, usable

CALLS = ["open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "link", "symlink", "truncate"]
EVENTS = {"os.rename": "rename", "os.remove": "unlink", "os.mkdir": "mkdir", "os.rmdir": "rmdir", "os.link": "link"}
OLD = 4
NEW = 8
DIED = 9


@contextmanager
def interruption(folder, number=-1, moment="before"):
    """Note the calls that change a folder, and do something at one of them.

    Args:
        folder: The folder.
        number: Of the call, from 0.
        moment: "before" it, "half" way through what it writes, "after" it, or "instead": the call fails.
    """
    calls = []

    def interrupted(name):
        original = getattr(os, name)

        def call(target, *args, **kwargs):
            path = path_of(target, kwargs.get("dir_fd"))
            only_reads = name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR)
            if only_reads or not path.startswith(str(folder)):
                return original(target, *args, **kwargs)
            calls.append((name, path.removeprefix(str(folder))))
            if len(calls) - 1 != number:
                return original(target, *args, **kwargs)
            if moment == "instead":
                raise OSError(errno.ENOSPC, "No space left on device", path)
            if moment == "half":
                original(target, args[0][: len(args[0]) // 2])
            if moment == "after":
                original(target, *args, **kwargs)
            os._exit(DIED)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, interrupted(name))
        yield calls


def path_of(target, folder):
    if isinstance(target, int):
        return str(Path(f"/proc/self/fd/{target}").readlink())
    base = Path(f"/proc/self/fd/{folder}").readlink() if folder is not None else Path.cwd()
    return str(base / target)


def begun_run(path, asynchronous=False):
    """A run that has an older checkpoint and keeps one."""
    run = FakeRun(path, keep_last=1, asynchronous=asynchronous)
    run.save(OLD)
    assert run.warnings == []
    return run


def calls_of_a_save(run):
    with interruption(run.checkpoints) as calls:
        assert_holds(run.save(NEW), NEW)
    assert run.warnings == []
    return calls


def save_interrupted(run, number, moment="before", best=None):
    with interruption(run.checkpoints, number, moment):
        run.save(NEW, best)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return calls_of_a_save(begun_run(tmp_path_factory.mktemp("undisturbed") / "run"))


def test_every_change_of_a_save_is_among_the_calls(run_dir):
    """As Python itself reports changes, however they are called."""
    run = begun_run(run_dir)

    def save():
        events = []

        def note(event, arguments):
            is_change = arguments[2] & (os.O_WRONLY | os.O_RDWR) if event == "open" else event in EVENTS
            if is_change:
                events.append(EVENTS.get(event, event))

        sys.addaudithook(note)
        calls = [name for name, _ in calls_of_a_save(run)]
        assert len(events) > 10
        assert Counter(events) == Counter(name for name in calls if name not in ("write", "fsync"))

    assert forked(save) == 0


def test_what_a_step_relies_on_is_on_the_disk_before_it(calls):
    """A machine that loses its power forgets what no `fsync` was waited for."""
    unsynced = set()
    renamed = []
    for name, path in calls:
        parent = path.rpartition("/")[0]
        if name == "write":
            unsynced |= {path, parent}
        elif name == "fsync":
            unsynced.discard(path)
        elif name in ("rename", "unlink", "rmdir"):
            assert unsynced <= {parent}, f"{name} of {path} before {unsynced} is on the disk"
        if name in ("rename", "mkdir"):
            unsynced.add(parent)
        if name == "rename":
            renamed.append(path)
    assert len(renamed) >= 2
    assert renamed[-1] == "/step_00000004"


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_death_at_any_step(asynchronous, calls, tmp_path):
    """After one call is before the next: nothing else changes the folder, as another test shows."""
    template = tmp_path / "template"
    begun_run(template)
    points = [(number, "before") for number in range(len(calls))]
    points += [(number, "half") for number, (name, _) in enumerate(calls) if name == "write"]
    points.append((len(calls) - 1, "after"))
    assert len(calls) > 20
    if asynchronous:
        # The same calls, from another thread.
        points = points[::4]
    found = Counter()
    for number, moment in points:
        path = tmp_path / f"{number}_{moment}"
        shutil.copytree(template, path)
        run = FakeRun(path, keep_last=1, asynchronous=asynchronous)

        assert forked(save_interrupted, run, number, moment) == DIED, (number, moment)
        found[tuple(usable(run.checkpoints))] += 1
        assert_training_goes_on(path)
        shutil.rmtree(path)
    assert found.total() == len(points)
    assert found.keys() >= {(OLD,), (NEW,)}
    assert asynchronous or (NEW, OLD) in found


def renames(calls):
    """Numbers of the calls that give the checkpoint its name, and that take the older one's away."""
    first, *_, last = (number for number, (name, _) in enumerate(calls) if name == "rename")
    return first, last


def refused(path, number, asynchronous=False):
    """A run whose second save meets a full disk in one call."""
    run = begun_run(path, asynchronous)
    save_interrupted(run, number, "instead")
    assert all("No space left on device" in text for text in run.warnings)
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_the_file_system_refuses_ends_neither_the_run_nor_the_older_checkpoint(
    asynchronous, calls, tmp_path
):
    for number in range(renames(calls)[0] + 1):
        run = refused(tmp_path / str(number), number, asynchronous)
        assert "step_00000004" in run.warnings[0]
        assert run.writer.last_step == OLD
        assert usable(run.checkpoints) == [OLD]
        assert len(list(run.checkpoints.iterdir())) == 1
        run.save(NEW + 1)
        assert usable(run.checkpoints) == [NEW + 1]
        assert len(run.warnings) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_system_that_does_not_answer_for_a_while_does_not_end_the_run(asynchronous, run_dir, monkeypatch):
    """Not even what is in a folder can be seen, as on a network file system whose server is gone."""
    run = begun_run(run_dir, asynchronous)

    def unanswered(original):
        def call(path, *args, **kwargs):
            if str(path).startswith(str(run.checkpoints)):
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return original(path, *args, **kwargs)

        return call

    with monkeypatch.context() as outage:
        for name in [*CALLS, "stat", "listdir", "scandir"]:
            outage.setattr(os, name, unanswered(getattr(os, name)))
        run.save(NEW)
    assert len(run.warnings) == 1
    assert "Stale file handle" in run.warnings[0]
    assert run.writer.last_step == OLD
    run.save(NEW + 1)
    assert usable(run.checkpoints) == [NEW + 1]


def test_a_checkpoint_that_got_its_name_but_no_marker_is_taken_away(calls, tmp_path):
    """Nobody would delete it, and where the disk is full nothing could be written any more."""
    for number in range(*renames(calls)):
        run = refused(tmp_path / str(number), number)
        steps = usable(run.checkpoints)
        assert OLD in steps
        assert len(list(run.checkpoints.iterdir())) == len(steps), calls[number]


def test_an_older_checkpoint_that_cannot_be_deleted_does_not_make_the_new_one_unwritten(calls, tmp_path):
    for number in range(renames(calls)[1], len(calls)):
        run = refused(tmp_path / str(number), number)
        assert usable(run.checkpoints)[0] == run.writer.last_step == NEW, calls[number]
        assert not any("of step 8 could not be written" in text for text in run.warnings), calls[number]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_an_attempt_that_is_overtaken_while_it_writes_publishes_nothing(call, run_dir, monkeypatch):
    """While it writes its part, and between the name and the marker."""
    run = begun_run(run_dir)
    original = getattr(os, call)

    def overtaken(*arguments):
        monkeypatch.undo()
        claim(run_dir / "attempts", {})
        return original(*arguments)

    monkeypatch.setattr(os, call, overtaken)
    with pytest.raises(TrainingFailed, match=r"attempt 2 .* has taken over"):
        run.save(NEW)
    assert usable(run.checkpoints) == [OLD]
    assert temporary_folders(run.checkpoints) == []


def test_nobody_can_guess_the_name_of_a_file_that_becomes_the_marker(tmp_path, monkeypatch):
    became = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: became.append((Path(old).name, new.name)) or rename(old, new))
    for number in range(2):
        FakeRun(tmp_path / f"run{number}").save(4)
    first, second = (old for old, new in became if new == "complete.json")
    assert first != second
