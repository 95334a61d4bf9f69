"""A file system that is full: nothing that was there is lost, the run goes on, and so does what is written later."""

import json
import os

import pytest

from disks import fill, small_disk
from largebatch.run.record.record import Journal
from largebatch.storage.attempts import claim
from largebatch.storage.catalog import entries, verify_checksums
from saving import FakeBackend, FakeRun, assert_holds, temporary_folders

# Weights in fp32 and a state in bf16: 900 KB.
WIDTH = 50_000


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=2) as folder:
        yield folder


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("left", [600_000, 8192, 4096, 0])
def test_a_checkpoint_that_does_not_fit(asynchronous, left, disk):
    run = FakeRun(disk / "run", keep_last=1, asynchronous=asynchronous, backend=FakeBackend(width=WIDTH))
    first = run.save(4)
    assert 2 * entries(run.checkpoints)[0].size > 1_700_000
    others = fill(disk, left)
    run.save(8)
    assert len(run.warnings) == 1
    assert "the checkpoint of step 8 could not be written" in run.warnings[0]
    assert "No space left on device" in run.warnings[0]
    assert first.name in run.warnings[0]
    assert run.not_written == [8]
    assert run.writer.last_step == 4
    assert [entry.path for entry in entries(run.checkpoints)] == [first]
    assert temporary_folders(run.checkpoints) == []
    verify_checksums(first)
    assert_holds(first, 4, WIDTH)
    others.unlink()
    second = run.save(12)
    assert len(run.warnings) == 1
    assert run.writer.last_step == 12
    assert [entry.path for entry in entries(run.checkpoints)] == [second]
    verify_checksums(second)
    assert_holds(second, 12, WIDTH)


def test_the_marker_that_does_not_fit(disk, monkeypatch):
    """The disk becomes full between the checkpoint's name and its marker."""
    run = FakeRun(disk / "run", keep_last=1, backend=FakeBackend(width=WIDTH))
    run.save(4)
    rename = os.rename

    def rename_and_fill(old, new):
        rename(old, new)
        if new == run.checkpoints / "step_00000008":
            fill(disk)

    monkeypatch.setattr(os, "rename", rename_and_fill)
    run.save(8)
    monkeypatch.undo()
    assert len(run.warnings) == 1
    assert "No space left on device" in run.warnings[0]
    assert run.not_written == [8]
    assert run.writer.last_step == 4
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000004"]


def test_lines_are_kept_until_they_can_be_written(disk):
    warnings = []
    written = []
    number = 0
    journal = Journal(disk / "metrics.jsonl", claim(disk / "attempts", {}), warnings.append)

    def append():
        nonlocal number
        number += 1
        journal.append({"step": number, "text": "x" * 6000})

    def steps():
        text = (disk / "metrics.jsonl").read_text()
        assert text.endswith("\n")
        return [json.loads(line)["step"] for line in text.splitlines()]

    append()
    for outage in (1, 2):
        written = steps()
        others = fill(disk)
        for _ in range(3):
            append()
            assert steps() == written
            assert len(warnings) == outage
        others.unlink()
        append()
        assert steps() == list(range(1, number + 1))
    assert number == 9
    assert "metrics.jsonl cannot be written: [Errno 28] No space left on device" in warnings[0]
