"""The local files that a config names, by paths, globs and folders.

They are found here alone: `datasets` is given the files, because its own globs do not follow links to folders, and
leave out some names.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import NamedTuple, NoReturn

import xxhash

from largebatch.config.data import HubOrLocal
from largebatch.errors import DataError

FIELDS = {"train": "data.data_files.train", "validation": "data.data_files.eval"}
WRITE_A_GLOB = "write a glob of the files that are meant"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
MAX_POINTER_BYTES = 1024  # of what Git LFS keeps in place of a file
MARK = re.compile(r"_SUCCESS|_(common_)?metadata|_(started|committed)_\d+")
"""What Spark and others put beside data."""


class LocalFile(NamedTuple):
    """A file, and what tells that it has changed."""

    path: Path
    size: int  # bytes
    changed: int  # ns since 1970


def found_files(config: HubOrLocal) -> dict[str, list[LocalFile]]:
    """The files of `data_files` by their splits, sorted within each glob and folder.

    Raises:
        DataError: A pattern matches nothing, or something that is not a file; a folder has files that may not be meant;
            a file would be read twice; or evaluation would read some of the files in a folder for training.
    """
    assert config.data_files is not None
    patterns = config.data_files.by_split
    found: dict[str, list[Path]] = {}
    for split, field in FIELDS.items():
        files = []
        for pattern in patterns[split]:
            files += _files_in(pattern, config.path, field) if _is_folder(pattern) else _matches(pattern, field)
        found[split] = check_once(files, field)
    if any(map(_is_folder, [*patterns["train"], *patterns["validation"]])):
        train, evaluation = (set(_places(files)) for files in found.values())
        if train != evaluation and (shared := sorted(train & evaluation)):
            raise DataError(
                f"{FIELDS['validation']}: {shared[0]} is read for training, too; move it to another folder, or "
                f"{WRITE_A_GLOB}"
            )
    return {split: [local_file(file, FIELDS[split]) for file in files] for split, files in found.items()}


def local_file(path: Path, field: str) -> LocalFile:
    """A file as it is now; DataError, which names the config's `field`, unless there is such a file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{field}: {path} cannot be read: {error.strerror}; correct that, or remove it") from error
    # For `fsspec`, it joins a file system and a path.
    if "::" in str(path):
        raise DataError(f"{field}: {path} would be read as two paths; rename it without ::")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{field}: {path} is not a file; write the paths of files")
    if status.st_size < MAX_POINTER_BYTES and path.read_bytes().startswith(LFS_POINTER):
        raise DataError(f"{field}: {path} only points to a file in Git LFS; run `git lfs pull` in its repository")
    return LocalFile(path, status.st_size, status.st_mtime_ns)


def state_of(files: Iterable[LocalFile]) -> str:
    """A checksum of the names, sizes and times of files."""
    return xxhash.xxh3_64_hexdigest(repr([(str(path), size, changed) for path, size, changed in files]).encode())


def check_no_links(folder: Path) -> None:
    """Raise DataError if a link in `data.path` leads to a folder, into which `datasets` looks only if told to."""
    for parent, folders, _ in os.walk(folder):
        # Nor does it look into these.
        folders[:] = [name for name in folders if name[0] not in "._"]
        for link in (Path(parent, name) for name in folders):
            if link.is_symlink():
                raise DataError(
                    f"data.path: {link} is a link to a folder, whose files may be left out; remove it, or write "
                    "folders as data_files, in which links are followed"
                )


def check_once(files: list[Path], field: str) -> list[Path]:
    """The files; DataError if one of them is there twice, from overlapping globs or through a link."""
    ((file, count),) = Counter(_places(files)).most_common(1)
    if count > 1:
        raise DataError(f"{field}: {file} would be read {count} times; name it once, or weight it in data.sources")
    return files


def _places(files: list[Path]) -> list[str]:
    """Where files are, without links on the way to them."""
    folders = {folder: os.path.realpath(folder) for folder in {file.parent for file in files}}
    return [os.path.realpath(file) if file.is_symlink() else f"{folders[file.parent]}/{file.name}" for file in files]


def _is_folder(pattern: str) -> bool:
    # `Path.is_dir` raises an error for what may not be looked at, or has too long a name.
    return os.path.isdir(pattern)  # noqa: PTH112


def _matches(pattern: str, field: str) -> list[Path]:
    # The name of a file may have brackets.
    matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))  # noqa: PTH110, PTH207
    files = [Path(name) for name in matches if not _is_folder(name)]
    # "**" also matches the folders in which it finds files.
    passed = {parent for file in files for parent in file.parents} if "**" in Path(pattern).parts else set()
    for folder in map(Path, filter(_is_folder, matches)):
        if folder not in passed and any(folder.glob("[!.]*")):
            raise DataError(f"{field}: {folder}, which {pattern!r} matches, is a folder; {WRITE_A_GLOB}, or the folder")
    if not files:
        raise DataError(
            f"{field}: no file matches {pattern!r} (relative to {Path.cwd()}); write the path of files or of their "
            "folder, or a glob"
        )
    return files


def _files_in(folder: str, format_name: str, field: str) -> list[Path]:
    """The files of a folder and those in it, without hidden ones and marks, such as Spark's `_SUCCESS`."""

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{field}: {error.filename} cannot be listed: {error.strerror}") from error

    files: list[Path] = []
    parents: dict[str, str] = {}
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = os.path.realpath(parent)
        if place in parents:
            raise DataError(f"{field}: {parents[place]} and {parent} are one folder; remove the link")
        parents[place] = parent
        for name in folders:
            # A table's log, such as `_delta_log`, or files that a job is writing.
            if name.startswith("_"):
                raise DataError(
                    f"{field}: {parent}/{name} is a folder that readers of tables leave out; {WRITE_A_GLOB}"
                )
        files += [Path(parent, name) for name in names if name[0] != "." and not MARK.fullmatch(name)]
    files.sort(key=str)
    if not files:
        raise DataError(f"{field}: {folder!r} is a folder without files; write the path of another")
    check_endings(files, format_name, field)
    return files


def check_endings(files: list[Path], format_name: str, field: str) -> None:
    """Raise DataError if a file has another ending than most, as a backup or a compressed copy has."""
    ((usual, _),) = Counter(file.suffix.lower() for file in files).most_common(1)
    others = [file for file in files if file.suffix.lower() != usual]
    # Images have many endings; other files are counted when data are prepared.
    if others and format_name != "imagefolder":
        raise DataError(f"{field}: {others[0]} is among files that end in {usual!r}; {WRITE_A_GLOB} as data_files")
