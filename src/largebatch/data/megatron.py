"""Megatron's token files: PREFIX.bin with all tokens, and PREFIX.idx that says where sequences and documents are.

The index, in little-endian: b"MMIDIDX\\0\\0"; uint64, the version, 1; uint8, the code of the tokens' type; uint64, the
number of sequences; uint64, the number of document boundaries; then arrays: int32, the tokens of each sequence; int64,
the byte at which each sequence begins in the .bin; int64, the sequence with which each document begins, and at the end
the number of sequences. Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.
"""

import struct
from collections.abc import Sequence
from functools import partial
from glob import glob
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from largebatch.data.local_files import check_once, local_file
from largebatch.data.token_stream import Part, TokenStream, mapped
from largebatch.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
MAX_ENDS = 20_000  # of documents, in all files, that are compared
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_megatron(prefixes: Sequence[str], field: str, vocab_size: int, end_of_text: int | None = None) -> TokenStream:
    """The tokens of all documents of PREFIX.bin, in their stored order, for one prefix after the other.

    Args:
        prefixes: Paths and globs of pairs of files, without .bin or .idx; what matches a glob is sorted.
        field: The config's field for them, for errors.
        vocab_size: Number of tokens of the tokenizer that the files were made with.
        end_of_text: The token that ends documents, if they are to be kept apart.

    Raises:
        DataError: A file is missing, is of another format, or does not fit the other, or documents have another end.
    """
    found = check_once([path for prefix in prefixes for path in _found(prefix)], field)
    parts = []
    for path in found:
        part, ends = _read(path, field)
        if end_of_text is not None:
            # Spread over the file, which need not be read whole.
            places = np.linspace(0, len(ends) - 1, min(len(ends), 1 + MAX_ENDS // len(found)), dtype=np.int64)
            num_other = np.count_nonzero(part.tokens()[ends[places] - 1] != end_of_text)
            if num_other:
                raise DataError(
                    f"data.attention: {num_other:,} of {len(places):,} compared documents of {path} do not end with "
                    f'token {end_of_text}; make the files with --append-eod, or write "block"'
                )
        parts.append(part)
    return TokenStream(parts, vocab_size)


def _found(prefix: str) -> list[Path]:
    """The prefix itself, whose files may be missing, or those that a glob matches."""
    path = Path(prefix).expanduser()
    # A name may have brackets.
    found = [] if Path(f"{path}.idx").exists() else sorted(glob(f"{path}.idx", recursive=True))  # noqa: PTH207
    return [Path(name.removesuffix(".idx")) for name in found] or [path]


def _read(prefix: Path, field: str) -> tuple[Part, NDArray[np.int64]]:
    """The tokens, and how many of them there are up to the end of each document that has some."""
    index, tokens = (Path(f"{prefix}.{ending}") for ending in ("idx", "bin"))
    for file in (index, tokens):
        if not file.is_file():
            raise DataError(f"{field}: there is no {file} (from {Path.cwd()}); write the path without .bin or .idx")
        local_file(file, field)
    with index.open("rb") as opened:
        header = opened.read(HEADER.size)
    if not header.startswith(MAGIC) or len(header) < HEADER.size:
        raise DataError(f"{field}: {index} is not an index of Megatron's format (MMIDIDX); convert it with Megatron-LM")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != 1 or code not in TYPES:
        raise DataError(f"{field}: {index} has version {version} and type code {code}, not 1 and one of {[*TYPES]}")
    itemsize = np.dtype(TYPES[code]).itemsize
    num_bytes = tokens.stat().st_size
    at = HEADER.size + 4 * num_sequences
    try:
        sizes = mapped(index, "<i4", HEADER.size, num_sequences)
        # As one array: 8 bytes for each sequence, until they are compared.
        begins = np.cumsum(np.append(0, sizes), dtype=np.int64) * itemsize
        pointers = mapped(index, "<i8", at, num_sequences)
        follow = num_bytes > 0 and sizes.min() >= 0 and np.array_equal(begins, np.append(pointers, num_bytes))
        # Documents are in order, from the first sequence to the end.
        firsts = mapped(index, "<i8", at + 8 * num_sequences, num_boundaries)
        in_order = bool((np.diff(firsts) >= 0).all()) and (firsts[0], firsts[-1]) == (0, num_sequences)
    # The file is too short, the index names no sequence, or more than there can be.
    except (ValueError, IndexError, OverflowError):
        follow = in_order = False
    if not (follow and in_order):
        raise DataError(f"{field}: {index} and {tokens} do not fit each other, or are damaged or empty; copy both")
    bounds = begins[firsts] // itemsize
    return Part(num_bytes // itemsize, partial(mapped, tokens, TYPES[code])), bounds[1:][np.diff(bounds) > 0]
