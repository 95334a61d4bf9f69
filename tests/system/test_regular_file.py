"""Files that somebody else may have put there, and numbers in variables."""

import os
import re
import time

import pytest

from largebatch.errors import LaunchError
from largebatch.system.regular_file import MAX_BYTES, read_bytes
from largebatch.system.variables import whole_number, whole_number_or_none


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert read_bytes(tmp_path / "file") == b"content"
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", follow_links=True) == b"content"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    begun = time.process_time()
    for name, follow in (("link", False), ("pipe", False), ("zero", True), ("large", False), (".", True)):
        with pytest.raises(OSError, match=name.replace(".", "director")):
            read_bytes(tmp_path / name, follow)
    assert time.process_time() - begun < 1


def test_whole_numbers_in_variables():
    assert whole_number("RANK", 3, {}) == whole_number("RANK", 3, {"RANK": ""}) == 3
    assert whole_number("RANK", 3, {"RANK": "017"}) == 17
    for text in ("²", "٣", "-1", "1.5", "x", " 1", "9" * 5000):
        with pytest.raises(LaunchError, match=rf"RANK is '{re.escape(text[:40])}', not a whole number"):
            whole_number("RANK", 0, {"RANK": text})
        assert whole_number_or_none("RANK", {"RANK": text}) is None
