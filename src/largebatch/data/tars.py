"""Labeled images in tar files, as WebDataset writes them, read where they lie by an index that is made once.

Members whose names are the same up to the first dot of the last part are a sample: `n01/17.jpg` and `n01/17.cls`. The
index says where each sample's image lies, and its label; it is in HF_HOME/largebatch. (`webdataset` reads in order; its
`wids`, which it has not had since 1.0, read the headers of a whole tar wherever a process opened it.)
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from huggingface_hub.constants import HF_HOME
from numpy.typing import NDArray

from largebatch.config.data import HubImages
from largebatch.data.hub import found_files
from largebatch.data.order import Indices
from largebatch.data.preparation import Preparation, write_errors
from largebatch.data.token_stream import mapped
from largebatch.errors import DataError
from largebatch.storage.files import replace_file

Index = NDArray[np.int64]
"""A row for each sample: the number of its tar, the image's first byte there, its size in bytes, and the label."""

REMEDIES = {
    "image_column": 'write other endings, as in "jpg;jpeg;png"',
    "label_column": "write each image's class, as a whole number, into a file of its own, such as 17.cls beside 17.jpg",
}
MAX_DIGITS = 18
"""Of a label, which is an int64."""
MAX_PADDING = 2**24  # bytes of zeros after the end; tar writes records of 10,240 bytes, or of a size that is given


class TarRows:
    """The samples of some tars, by their indices, as rows of a `datasets` data set.

    Args:
        config: The recipe's section; its columns are the endings of the members' names.
        split: "train" or "validation".
        preparation: Who makes the index.

    Raises:
        DataError: A file is no tar without compression, or a sample lacks its image or its label.
        NotPrepared: The index is not there, and may not be made here.
    """

    def __init__(self, config: HubImages, split: str, preparation: Preparation):
        self._config = config
        self._files = found_files(config)[split]
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self._files]
        key = xxhash.xxh3_64_hexdigest(repr([states, config.image_column, config.label_column]).encode())
        path = Path(HF_HOME) / "largebatch" / f"tars_{split}_{key}.npy"
        if not path.is_file():
            preparation.check(config, sum(size for _, size, _ in states))
            self._write(path)
        try:
            self._index: Index = np.load(path, mmap_mode="r")
            is_whole = self._index.dtype == np.int64 and self._index.shape[1:] == (4,)
        except (ValueError, EOFError):
            is_whole = False
        if not is_whole:
            raise DataError(f"{path} is damaged; remove it, and prepare the data again")
        self.labels = self._index[:, 3]

    def _write(self, path: Path) -> None:
        rows = [row for number, file in enumerate(self._files) for row in self._samples(number, file)]
        content = io.BytesIO()
        np.save(content, np.array(rows, np.int64).reshape(-1, 4))
        with write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content.getvalue())

    def _samples(self, number: int, file: Path) -> Iterator[tuple[int, int, int, int]]:
        try:
            # Random access needs a tar without compression.
            with tarfile.open(file, "r:") as tar:
                samples: dict[str, dict[str, tarfile.TarInfo]] = {}
                size = file.stat().st_size
                for member in tar:
                    if member.issparse() or not 0 <= member.size <= size - member.offset_data:
                        raise ValueError(
                            f"the header of {member.name!r} is damaged, of a sparse file, or of one cut off"
                        )
                    folder, slash, name = member.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    if member.isfile() and stem:
                        members = samples.setdefault(f"{folder}{slash}{stem}", {})
                        if ending in members:
                            raise DataError(f"data: {file} has two files {member.name}; remove one of them")
                        members[ending] = member
                _check_end(file, tar.offset)
                for name, members in samples.items():
                    image = self._member(file, name, members, "image_column")
                    label = self._member(file, name, members, "label_column")
                    opened = tar.extractfile(label)
                    assert opened is not None
                    digits = opened.read(MAX_DIGITS + 1)
                    if len(digits) > MAX_DIGITS or not digits.strip().isdigit():
                        raise DataError(
                            f"data.label_column: {label.name!r} in {file} has {digits!r}; {REMEDIES['label_column']}"
                        )
                    yield number, image.offset_data, image.size, int(digits)
        except DataError:
            raise
        # A damaged header may ask for any amount of memory, or lead to itself.
        except (tarfile.TarError, ValueError, MemoryError, OverflowError, RecursionError) as error:
            what = str(error) or type(error).__name__
            raise DataError(
                f"data.data_files: {file} cannot be read: {what}; write tars without compression, and copy a damaged "
                "one again"
            ) from error

    def _member(self, file: Path, name: str, members: dict[str, tarfile.TarInfo], field: str) -> tarfile.TarInfo:
        endings = getattr(self._config, field).split(";")
        found = [member for ending, member in members.items() if ending in endings]
        if len(found) != 1:
            raise DataError(
                f"data.{field}: the sample {name!r} in {file} has {', '.join([*members][:9])}, and must have exactly "
                f"one of {', '.join(endings)}; {REMEDIES[field]}"
            )
        return found[0]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, indices: Indices) -> dict[str, Sequence[Any]]:
        rows = self._index[indices].tolist()
        images = []
        for number, start, size, _ in rows:
            file = self._files[number]
            image = mapped(file, "u1")[start : start + size].tobytes()
            images.append({"bytes": image, "path": f"{file} at byte {start:,}"})
        return {
            self._config.image_column: images,
            self._config.label_column: [label for *_, label in rows],
        }


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
