"""Files that are whole or absent, whenever the process or the machine stops; and files of JSON lines, whose last line
may have been cut short.

Every change of the file system is a call of `os` (`pathlib` and `shutil` make such calls, too), so that a test can
stop the process before and after each of them.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from largebatch.system.presence import exists
from largebatch.system.regular_file import read_bytes

CHUNK_BYTES = 16 * 2**20

Content = bytes | Iterable[memoryview]
"""What a file has: bytes, or parts that follow each other."""

Line = dict[str, Any]
"""The object in a line of a file of JSON lines."""


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes, and the XXH3-128 checksum of its content, in hexadecimal."""

    size: int
    checksum: str


def write_file(path: Path, content: Content) -> FileRecord:
    """Write a file and wait until it is on disk; an older file, or a link, is replaced."""
    digest = xxhash.xxh3_128()
    size = 0
    # Somebody else may write to the folder: with O_EXCL, no link is followed, and no file of theirs is written to.
    if os.path.lexists(path):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    parts = [memoryview(content)] if isinstance(content, bytes) else content
    try:
        for part in parts:
            left = part.cast("B")
            while left:
                written = os.write(descriptor, left[:CHUNK_BYTES])
                digest.update(left[:written])
                size += written
                left = left[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(size, digest.hexdigest())


def write_json_file(path: Path, value: Any) -> FileRecord:
    """`write_file` with a value as JSON."""
    return write_file(path, _as_json(value))


def replace_file(path: Path, content: Content, keep_mode: bool = False) -> FileRecord:
    """Replace a file in such a way that readers, even after a crash, see the old one or all of the new one.

    Args:
        path: The file; a link is replaced, too.
        content: What is written.
        keep_mode: Whether the new file has the permissions of the old one, which must be there.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        record = write_file(temporary, content)
        if keep_mode:
            shutil.copymode(path, temporary)
        temporary.rename(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return record


def replace_json_file(path: Path, value: Any) -> None:
    """`replace_file` with a value as JSON."""
    replace_file(path, _as_json(value))


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def sync_folder(path: Path) -> None:
    """Wait until the folder's list of files is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_folder(old: Path, new: Path) -> None:
    """Give a folder another name in the same parent."""
    old.rename(new)
    sync_folder(new.parent)


def link_folder(folder: Path, path: Path) -> None:
    """Make a folder whose files are those of another, which never change; deleting either leaves the other whole."""
    path.mkdir(parents=True)
    for file in folder.iterdir():
        os.link(file, path / file.name)


def remove_folder(path: Path) -> None:
    """Delete a folder and everything in it, or a link to one, if it is there; OSError if something of it stays."""

    def fail_unless_gone(_: object, __: str, raised: tuple[Any, BaseException, Any]) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, onerror=fail_unless_gone)


def read_record(path: Path) -> FileRecord:
    """Size and checksum of a file as it is now."""
    with path.open("rb", buffering=0) as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return FileRecord(file.tell(), checksum)


def read_json_lines(path: Path) -> list[Line]:
    """The lines of a file that can be read."""
    texts = read_bytes(path).split(b"\n") if exists(path) else []
    return [line for line in map(parse_line, texts) if line is not None]


def parse_line(text: bytes) -> Line | None:
    """The object in a line; None if it is not a line of a journal."""
    line = parse_object(text)
    return line if line is not None and isinstance(line.get("step", 0), int | float) else None


def parse_object(text: bytes) -> Line | None:
    """A JSON object; None if the text is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
