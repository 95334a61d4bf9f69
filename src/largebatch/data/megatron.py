"""Megatron's token files: PREFIX.bin with all tokens, and PREFIX.idx that says where sequences and documents are.

The index, in little-endian: b"MMIDIDX\\0\\0"; uint64, the version, 1; uint8, the code of the tokens' type; uint64, the
number of sequences; uint64, the number of document boundaries; then arrays: int32, the tokens of each sequence; int64,
the byte at which each sequence begins in the .bin; int64, the sequence with which each document begins, and at the end
the number of sequences. Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np

from largebatch.data.token_stream import Array, TokenStream, mapped
from largebatch.errors import DataError

MAGIC, HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_megatron(prefixes: Sequence[str], field: str, vocab_size: int) -> TokenStream:
    """The tokens of all documents of PREFIX.bin, in their stored order, for one prefix after the other.

    Args:
        prefixes: Paths and globs of pairs of files, without .bin or .idx; what matches a glob is sorted.
        field: The config's field for them, for errors.
        vocab_size: Number of tokens of the tokenizer that the files were made with.

    Raises:
        DataError: A file is missing, is of another format, or does not fit the other.
    """
    files = [_read(path, field) for prefix in prefixes for path in _found(prefix)]
    return TokenStream(
        [file.num_tokens for file in files],
        [file.arrays.num_boundaries - 1 for file in files],
        partial(_tokens, files),
        partial(_ends, files),
        vocab_size,
    )


def _found(prefix: str) -> list[Path]:
    """The prefixes that a glob matches, or the prefix itself, whose files may be missing."""
    found = sorted(glob(f"{Path(prefix).expanduser()}.idx", recursive=True))  # noqa: PTH207 - as for `data_files`
    return [Path(name.removesuffix(".idx")) for name in found] or [Path(prefix).expanduser()]


class _Files(NamedTuple):
    """A pair of files that fit each other."""

    tokens: Path
    dtype: str
    num_tokens: int
    arrays: "_Arrays"


def _read(prefix: Path, field: str) -> _Files:
    index, tokens = (Path(f"{prefix}.{ending}") for ending in ("idx", "bin"))
    for file in (index, tokens):
        if not file.is_file():
            raise DataError(f"{field}: there is no {file} (from {Path.cwd()}); write the path without .bin or .idx")
    with index.open("rb") as opened:
        header = opened.read(HEADER.size)
    if not header.startswith(MAGIC) or len(header) < HEADER.size:
        raise DataError(f"{field}: {index} is not an index of Megatron's format (MMIDIDX); convert it with Megatron-LM")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != 1 or code not in TYPES:
        raise DataError(f"{field}: {index} has version {version} and type code {code}, not 1 and one of {[*TYPES]}")
    dtype, num_bytes = TYPES[code], tokens.stat().st_size
    itemsize, at = np.dtype(dtype).itemsize, HEADER.size
    arrays = _Arrays(index, at + 4 * num_sequences, num_sequences, num_boundaries, itemsize)
    try:
        fits = arrays.fit(mapped(index, "<i4", at, num_sequences), num_bytes)
    # The file is too short, the index names no sequence, or more than there can be.
    except (ValueError, IndexError, OverflowError):
        fits = False
    if not fits:
        raise DataError(f"{field}: {index} and {tokens} do not fit each other, or are damaged or empty; copy both")
    return _Files(tokens, dtype, num_bytes // itemsize, arrays)


class _Arrays(NamedTuple):
    """The places of the arrays in an index."""

    file: Path
    at: int  # the byte with which the pointers begin
    num_sequences: int
    num_boundaries: int
    itemsize: int  # bytes of a token

    def open(self) -> tuple[Array, Array]:
        """The byte at which each sequence begins, and the first sequence of each document."""
        pointers = mapped(self.file, "<i8", self.at, self.num_sequences)
        return pointers, mapped(self.file, "<i8", self.at + 8 * self.num_sequences, self.num_boundaries)

    def fit(self, sizes: Array, num_bytes: int) -> bool:
        """Whether sequences of these sizes follow each other to the end of the tokens, and documents are in order."""
        pointers, documents = self.open()
        # As one array: 8 bytes for each sequence, until they are compared.
        begins = np.cumsum(np.append(0, sizes), dtype=np.int64) * self.itemsize
        follow = sizes.min() >= 0 and np.array_equal(begins, np.append(pointers, num_bytes))
        in_order = bool((np.diff(documents, prepend=0, append=self.num_sequences) >= 0).all())
        return follow and in_order and num_bytes > 0 and documents[0] == 0 and documents[-1] == self.num_sequences


def _ends(files: Sequence[_Files], part: int) -> Array:
    return _ends_in(files[part])


@lru_cache(maxsize=64)  # 8 bytes for each document of a file
def _ends_in(file: _Files) -> Array:
    pointers, documents = file.arrays.open()
    return np.append(pointers // file.arrays.itemsize, file.num_tokens)[documents[1:]]


def _tokens(files: Sequence[_Files], part: int) -> Array:
    return mapped(files[part].tokens, files[part].dtype)
