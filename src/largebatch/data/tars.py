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
        self._index: Index = np.load(path, mmap_mode="r")
        self.labels = self._index[:, 3]

    def _write(self, path: Path) -> None:
        rows = [row for number, file in enumerate(self._files) for row in self._samples(number, file)]
        content = io.BytesIO()
        np.save(content, np.array(rows, np.int64).reshape(-1, 4))
        with write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [content.getbuffer()])

    def _samples(self, number: int, file: Path) -> Iterator[tuple[int, int, int, int]]:
        try:
            # Random access needs a tar without compression.
            with tarfile.open(file, "r:") as tar:
                samples: dict[str, dict[str, tarfile.TarInfo]] = {}
                for member in tar:
                    folder, _, name = member.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    if member.isfile() and stem:
                        members = samples.setdefault(f"{folder}/{stem}", {})
                        if ending in members:
                            raise DataError(f"data: {file} has two files {member.name}; remove one of them")
                        members[ending] = member
                for name, members in samples.items():
                    image = self._member(file, name, members, self._config.image_column)
                    label = self._member(file, name, members, self._config.label_column)
                    opened = tar.extractfile(label)
                    assert opened is not None
                    yield number, image.offset_data, image.size, int(opened.read())
        except DataError:
            raise
        except (tarfile.TarError, ValueError) as error:
            raise DataError(
                f"data.data_files: {file} cannot be read: {error}; write tars without compression, whose labels are "
                "whole numbers, and copy a damaged one again"
            ) from error

    @staticmethod
    def _member(file: Path, name: str, members: dict[str, tarfile.TarInfo], endings: str) -> tarfile.TarInfo:
        for ending in endings.split(";"):
            if ending in members:
                return members[ending]
        raise DataError(
            f"data: the sample {name!r} in {file} has {', '.join([*members][:9])}, and no {endings}; write other "
            'endings, as in "jpg;jpeg;png" and "cls", in data.image_column and data.label_column'
        )

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, indices: Indices) -> dict[str, Sequence[Any]]:
        rows = self._index[indices].tolist()
        images = [mapped(self._files[number], "u1")[start : start + size] for number, start, size, _ in rows]
        return {
            self._config.image_column: [{"bytes": image.tobytes(), "path": None} for image in images],
            self._config.label_column: [label for *_, label in rows],
        }
