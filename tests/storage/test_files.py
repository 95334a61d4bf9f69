"""Files are whole or absent, and known by size and checksum."""

import json
import os
from unittest.mock import Mock

import pytest

from largebatch.storage import files
from largebatch.storage.files import (
    FileRecord,
    read_record,
    remove_folder,
    replace_file,
    replace_json_file,
    write_file,
    write_json_file,
)


def views(*parts):
    return [memoryview(part) for part in parts]


def test_parts_are_written_one_after_another(tmp_path):
    # Of `xxh128sum`.
    record = FileRecord(3, "06b05ab6733a618578af5f94892f3950")
    assert write_file(tmp_path / "file", views(b"a", b"", b"bc")) == read_record(tmp_path / "file") == record
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_file_system_that_takes_a_few_bytes_at_a_time(tmp_path, monkeypatch):
    write = os.write
    content = bytes(range(256)) * 3
    whole = write_file(tmp_path / "whole", views(content))
    sizes = []
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(len(data)) or write(fd, data[:7]))
    assert write_file(tmp_path / "file", views(content[:300], content[300:])) == whole
    assert (tmp_path / "file").read_bytes() == content
    assert max(sizes) == 100
    assert read_record(tmp_path / "file") == whole


def test_json_files_are_json(tmp_path):
    value = {"name": "größer \ud800", "list": [1, 2.5, None]}
    write_json_file(tmp_path / "written.json", value)
    replace_json_file(tmp_path / "replaced.json", value)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text(encoding="utf-8")) == value
        assert path.read_text(encoding="utf-8").endswith("\n")


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write = os.write

    def write_a_byte(descriptor, data):
        assert path.read_bytes() == b"old"
        return write(descriptor, data[:1])

    monkeypatch.setattr(os, "write", write_a_byte)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_else(call, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_links_of_others_are_not_followed(tmp_path):
    """Somebody who may write to the folder has put links where temporary files could be."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    names = ["file", "other", *(f".file.{number}.tmp" for number in (os.getpid(), os.getppid()))]
    for name in names:
        (tmp_path / name).symlink_to(mine)
    replace_file(tmp_path / "file", b"new")
    write_file(tmp_path / "other", views(b"new"))
    assert mine.read_bytes() == b"mine"
    assert [(tmp_path / name).read_bytes() for name in ("file", "other")] == [b"new", b"new"]


def test_a_folder_that_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rmdir", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        remove_folder(tmp_path)
