"""A log on a file system that is full: nothing that was there is lost, and later lines follow."""

import json

import pytest

from disks import fill, small_disk
from largebatch.run.record.journal import Journal
from largebatch.storage.attempts import claim

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=2) as folder:
        yield folder


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
