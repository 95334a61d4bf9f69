"""Which folders are checkpoints, which of them can be used, and which are deleted."""

import json
import shutil

import pytest

from largebatch.storage.catalog import (
    discard,
    entries,
    entry_at,
    prune,
    remove_leftovers,
    set_aside,
)
from saving import ATTEMPT, checksum_problem, make_checkpoint

LEFTOVERS = [".step_00000007.attempt_0001_0123abcd.tmp", ".step_00000007.attempt_12345_0123abcd.old"]
LOOK_ALIKES = [
    "step_7",
    "step_0000007",
    "step_0000000x",
    "step_00000007.tmp",
    "xstep_00000007",
    "step_00000007\n",
    "STEP_00000007",
    "step_٠٠٠٠٠٠٠٧",
    "set_aside_by_attempt_0001_0123abcd",
]


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1 to 6, of which 2 and 5 are not complete."""
    for step in range(1, 7):
        make_checkpoint(tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000002/complete.json").unlink()
    (tmp_path / "step_00000005/rank_00000.safetensors").unlink()
    return tmp_path


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in folder.iterdir() if path.name.startswith("step_"))


def test_the_newest_is_the_first(folder):
    make_checkpoint(folder / "step_123456789")
    found = entries(folder)
    assert [entry.step for entry in found] == [123456789, 6, 5, 4, 3, 2, 1]
    assert [entry.step for entry in found if entry.problem] == [5, 2]
    assert found[1].path == folder / "step_00000006"
    assert found[1].size == len(b"{}") + len(b"tensors")


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert entries(tmp_path) == entries(tmp_path / "none") == []
    remove_leftovers(tmp_path / "none")
    set_aside(tmp_path / "none", 0, ATTEMPT)


def test_names_that_only_look_like_checkpoints_are_ignored(tmp_path):
    for name in [*LOOK_ALIKES, *LEFTOVERS]:
        make_checkpoint(tmp_path / name)
    assert entries(tmp_path) == []
    prune(tmp_path, 1, lambda _: False, ATTEMPT)
    set_aside(tmp_path, 0, ATTEMPT)
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(LOOK_ALIKES)


def test_problems_are_named(tmp_path):
    path = make_checkpoint(tmp_path / "step_00000007")
    assert entry_at(path).problem is None
    (path / "rank_00000.safetensors").write_bytes(b"tens")
    assert entry_at(path).problem == "rank_00000.safetensors has 4 bytes, but had 7 when it was complete"
    (path / "rank_00000.safetensors").unlink()
    assert entry_at(path).problem == "rank_00000.safetensors is missing"
    (path / "rank_00000.safetensors").mkdir()
    assert "bytes, but had 7 when it was complete" in entry_at(path).problem
    (path / "complete.json").unlink()
    assert entry_at(path).problem == "there is no complete.json in it, so it is not a complete checkpoint"
    shutil.rmtree(path)
    assert entry_at(path).problem == "there is no such folder"
    path.write_text("a file")
    assert entry_at(path).problem == "there is no such folder"


def test_a_checkpoint_may_be_given_another_name(tmp_path):
    entry = entry_at(make_checkpoint(tmp_path / "best"))
    assert (entry.step, entry.problem) == (-1, None)
    assert entry_at(make_checkpoint(tmp_path / "step_00000012")).step == 12


def test_linked_folders_are_not_used_and_what_they_link_to_stays(tmp_path):
    target = make_checkpoint(tmp_path / "elsewhere/checkpoint")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step_00000007").symlink_to(target)
    (folder / LEFTOVERS[0]).symlink_to(target)
    (entry,) = entries(folder)
    assert entry.problem == checksum_problem(entry.path) == "it is a link, not a folder"
    assert entry_at(entry.path).problem == "it is a link, not a folder"
    remove_leftovers(folder)
    prune(folder, 0, lambda _: False, ATTEMPT)
    discard(entry.path, ATTEMPT)
    assert entry_at(target).problem is checksum_problem(target) is None


@pytest.mark.parametrize(
    "marker",
    [
        [],
        {},
        {"files": {"rank_00000.safetensors": {"size": 7, "checksum": "0"}}},
        {"files": {"manifest.json": {"size": "2", "checksum": "0"}}},
    ],
)
def test_markers_of_another_form_are_refused(marker, tmp_path):
    path = make_checkpoint(tmp_path / "step_00000007")
    (path / "complete.json").write_text(json.dumps(marker))
    assert entry_at(path).problem is not None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "$(touch x)",
        "/etc/passwd",
        "complete.json",
        "rank_0.safetensors",
        "rank_00000xsafetensors",
        "rank_00000.safetensors\n",
        "rank_00000.safetensors/../x",
    ],
)
def test_markers_that_name_other_files_are_refused(name, tmp_path):
    (tmp_path / "x").write_bytes(b"")
    path = make_checkpoint(tmp_path / "step_00000007")
    marker = json.loads((path / "complete.json").read_text())
    marker["files"][name] = {"size": 0, "checksum": "99aa06d3014798d86001c324468d497f"}
    (path / "complete.json").write_text(json.dumps(marker))
    assert "which is not a checkpoint's" in entry_at(path).problem
    assert "which is not a checkpoint's" in checksum_problem(path)


@pytest.mark.parametrize("num_shares", [2, 7])
def test_each_file_is_read_by_one_of_the_processes(num_shares, tmp_path):
    names = ["manifest.json", "model_config.json", "rank_00000.safetensors"]
    readers = set()
    for name in names:
        path = make_checkpoint(tmp_path / name / "step_00000007", dict.fromkeys(names, b"content"))
        (path / name).write_bytes(b"changed")
        problems = [checksum_problem(path, share, num_shares) for share in range(num_shares)]
        (problem,) = filter(None, problems)
        assert name in problem
        readers.add(problems.index(problem))
    assert len(readers) == min(num_shares, len(names))


@pytest.mark.parametrize(
    ("keep_last", "for_ever", "left"),
    [
        (None, (), [1, 2, 3, 4, 5, 6]),
        (9, (), [1, 2, 3, 4, 5, 6]),
        (2, (6, 4, 1), [1, 2, 4, 5, 6]),
        (1, (5, 2), [2, 5, 6]),
    ],
)
def test_old_complete_checkpoints_are_deleted(keep_last, for_ever, left, folder):
    prune(folder, keep_last, lambda step: step in for_ever, ATTEMPT)
    assert steps_in(folder) == left
    assert len(list(folder.iterdir())) == len(left)


def test_leftovers_are_removed_and_nothing_else(folder):
    for name in LEFTOVERS:
        make_checkpoint(folder / name)
    others = [".step_00000007.attempt_1_0123abcd.tmp", ".step_00000007.tmp", ".hidden", "notes"]
    for name in others:
        (folder / name).mkdir()
    remove_leftovers(folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {*others, *(f"step_{step:08d}" for step in range(1, 7))}


def test_later_checkpoints_are_set_aside_whole_unless_they_were_never_complete(folder):
    set_aside(folder, 1, ATTEMPT)
    assert steps_in(folder) == [1]
    aside = folder / f"set_aside_by_attempt_{ATTEMPT}"
    assert steps_in(aside) == [3, 4, 5, 6]
    assert checksum_problem(aside / "step_00000006") is None
    assert {path.name[0] for path in folder.iterdir()} == {"s"}


def test_a_checkpoint_with_the_name_of_another_is_not_used(tmp_path):
    make_checkpoint(tmp_path / "step_00000005").rename(tmp_path / "step_00000009")
    (entry,) = entries(tmp_path)
    assert entry.problem == "it is of step 5, but its name says otherwise"
