"""A log on a file system that is full: nothing that was there is lost, and later lines follow."""

import json
from itertools import count

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
    path = disk / "metrics.jsonl"
    journal = Journal(path, claim(disk / "attempts", {}), warnings.append)
    numbers = count(1)

    def append():
        journal.append({"step": next(numbers), "text": "x" * 6000})

    append()
    for outage in (1, 2):
        written = path.read_text()
        filler = fill(disk)
        for _ in range(3):
            append()
            assert path.read_text() == written
            assert len(warnings) == outage
        filler.unlink()
        append()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 10))
    assert "metrics.jsonl cannot be written: [Errno 28] No space left on device" in warnings[0]
