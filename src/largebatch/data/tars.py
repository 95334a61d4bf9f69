"""Images in tar files with their labels or texts, as WebDataset writes them, read where they lie by an index that is
made once.

Members whose names are the same up to the first dot of the last part are a sample: `n01/17.jpg` and `n01/17.cls`. The
index says where each sample's image lies, and its label or where its text lies. (`webdataset` reads in order; its
`wids`, which it has not had since 1.0, read the headers of a whole tar wherever a process opened it.)
"""

import os
import tarfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from io import FileIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from largebatch.config.data import EncodedImages
from largebatch.data.local_files import LocalFile, found_files, state_of
from largebatch.data.order import Indices
from largebatch.data.preparation import Preparation, kept
from largebatch.data.token_stream import MAX_MAPS
from largebatch.errors import DataError
from largebatch.system.parent_process import end_with_parent

Index = NDArray[np.int64]
"""A row for each sample: the number of its tar, the image's first byte there and its size in bytes; and the text's
first byte and size, or the label and 0."""
Members = dict[str, tarfile.TarInfo]
"""The files of a sample by the endings of their names."""

REMEDIES = {
    "image_column": 'write other endings, as in "jpg;jpeg;png", or names without other dots: a.b.jpg ends with .b.jpg',
    "label_column": "write each image's class, as a whole number, into a file of its own, such as 17.cls beside 17.jpg",
}
_opened = lru_cache(maxsize=MAX_MAPS)(FileIO)
MAX_DIGITS = 18
"""Of a label, which is an int64."""
MAX_PADDING = 2**24  # bytes of zeros after the end; tar writes records of 10,240 bytes, or of a size that is given


def open_tars(config: EncodedImages, preparation: Preparation, other_field: str) -> tuple["TarRows", "TarRows"]:
    """The samples for training and those for evaluation.

    Args:
        config: The recipe's section; its columns are the endings of the members' names.
        preparation: Who makes the index.
        other_field: The section's field for what images have: "label_column", or one for texts. A text that is not
            there is empty, and bytes that are not UTF-8 are Python's surrogate escapes.

    Raises:
        DataError: A file is not a tar without compression, or a sample lacks its image or its label.
        NotPrepared: The index is not there, and may not be made here.
    """
    if (config.train_split, config.eval_split) != ("train", "validation"):
        raise DataError("data.train_split, data.eval_split: tars have no parts; remove them, and list other tars")
    files = found_files(config)
    train, evaluation = (TarRows(config, split, listed, preparation, other_field) for split, listed in files.items())
    return train, evaluation


class TarRows:
    """The samples of some tars, by their indices, as rows of a `datasets` data set; labels are apart in `labels`."""

    def __init__(
        self,
        config: EncodedImages,
        split: str,
        files: list[LocalFile],
        preparation: Preparation,
        other_field: str,
    ):
        self._columns = {field: getattr(config, field) for field in ("image_column", other_field)}
        self._endings = {field: endings.lower().split(";") for field, endings in self._columns.items()}
        self._has_texts = other_field != "label_column"
        self._skips = getattr(config, "on_invalid", "refuse") == "skip"
        # The name that `datasets` has for what tells the rows of two data sets apart.
        self._fingerprint = xxhash.xxh3_64_hexdigest(repr([state_of(files), self._columns, self._skips]).encode())

        def index() -> Index:
            preparation.check(config, sum(file.size for file in files))
            workers = preparation.workers_for(config) or 1
            with ProcessPoolExecutor(workers, get_context("fork"), end_with_parent) as pool:
                return np.concatenate([*pool.map(self._rows, range(len(files)), files)])

        self._files = [file.path for file in files]
        self._index = kept(f"tars_{split}_{self._fingerprint}", index, (5,))
        self.labels = self._index[:, 3]
        if not len(self):
            raise DataError(
                f"data.data_files: the tars of {split!r} have no files with endings; write names such as 17.jpg"
            )

    def _rows(self, number: int, file: LocalFile) -> Index:
        rows = []
        for name, members in self._samples(file.path, file.size).items():
            image, other = (self._member(file.path, name, members, field) for field in self._columns)
            last = (other.offset_data, other.size) if self._has_texts else (_label(file.path, other), 0)
            rows.append((number, image.offset_data, image.size, *last))
        return np.array(rows, np.int64).reshape(-1, 5)

    def _samples(self, file: Path, size: int) -> dict[str, Members]:
        """The samples of a tar by their names."""
        samples: dict[str, Members] = {}
        try:
            # Random access needs a tar without compression.
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if member.issparse() or not 0 <= member.size <= size - member.offset_data:
                        raise ValueError(
                            f"the header of {member.name!r} is damaged, of a sparse file, or of one cut off"
                        )
                    folder, slash, name = member.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    # As in WebDataset: cameras write capitals.
                    ending = ending.lower()
                    if (member.islnk() or member.issym()) and any(ending in each for each in self._endings.values()):
                        raise DataError(f"data: {file} has a link, {member.name}; write it with the files themselves")
                    # WebDataset skips names without one, such as README.
                    if member.isfile() and stem and ending:
                        members = samples.setdefault(f"{folder}{slash}{stem}", {})
                        if ending in members:
                            raise DataError(f"data: {file} has two files {member.name}; remove one of them")
                        members[ending] = member
                _check_end(file, tar.offset)
        except DataError:
            raise
        # A damaged header may ask for any amount of memory, or lead to itself.
        except (tarfile.TarError, ValueError, MemoryError, OverflowError, RecursionError) as error:
            what = str(error) or type(error).__name__
            raise DataError(
                f"data.data_files: {file} cannot be read: {what}; write tars without compression, and copy a damaged "
                "one again"
            ) from error
        return samples

    def _member(self, file: Path, name: str, members: Members, field: str) -> tarfile.TarInfo:
        endings = self._endings[field]
        found = [member for ending, member in members.items() if ending in endings]
        if self._has_texts and not found and (self._skips or field != "image_column"):
            return tarfile.TarInfo()
        if len(found) != 1:
            raise DataError(
                f"data.{field}: the sample {name!r} in {file} has {', '.join([*members][:9])}, and must have exactly "
                f"one of {', '.join(endings)}; {REMEDIES.get(field, 'write other endings')}"
            )
        return found[0]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, indices: Indices) -> dict[str, Sequence[Any]]:
        images = []
        texts: list[str] = []
        for number, start, size, *text in self._index[indices].tolist():
            file = self._files[number]
            images.append({"bytes": _bytes(file, start, size), "path": f"{file} at byte {start:,}"})
            if self._has_texts:
                texts.append(_bytes(file, *text).decode("utf-8-sig", "surrogateescape"))
        return dict(zip(self._columns.values(), (images, texts), strict=True))


def _label(file: Path, member: tarfile.TarInfo) -> int:
    digits = _bytes(file, member.offset_data, min(member.size, MAX_DIGITS + 1))
    if len(digits) > MAX_DIGITS or not digits.strip().isdigit():
        raise DataError(f"data.label_column: {member.name!r} in {file} has {digits!r}; {REMEDIES['label_column']}")
    return int(digits)


def _bytes(file: Path, start: int, size: int) -> bytes:
    """Some bytes of a file; fewer if it has been cut off, where reading a map would end the process."""
    opened = _opened(file)
    return os.pread(opened.fileno(), size, start)


def _check_end(file: Path, end: int) -> None:
    """Raise ValueError unless a tar has the mark of its end where its last header was read, and nothing after it.

    `tarfile` takes a damaged header in the middle for the end.
    """
    with file.open("rb") as opened:
        opened.seek(end)
        if opened.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
            raise ValueError(
                f"it has neither a header nor the mark of its end at byte {end:,}: it is damaged or cut off"
            )
        # More than the end of any record is not read: a file of holes may have any size.
        rest = opened.read(MAX_PADDING + 1)
        if rest.strip(tarfile.NUL) or len(rest) > MAX_PADDING:
            raise ValueError(
                f"it goes on after its end at byte {end:,}: it is damaged, or joined of several tars; write them apart"
            )
