"""Documents as tokens in memory-mapped files, made once, from which every run reads them.

Each split of a data set has a folder, whose name depends on everything that its tokens depend on. The rows are divided
into ranges, and each range becomes a *shard*:

    00007.tokens    the tokens of the documents, each with its end-of-text token: uint16 or, beyond 2^16, int32
    00007.ends      where each document ends among them: int64
    00007.json      which rows these are, counts, sizes and checksums; written when both files are on disk
    manifest.json   the source of the data, and the counts and checksums of all shards; written last

A shard is made again unless its JSON says that it has these rows, so interrupted work resumes.
"""

import json
import re
from dataclasses import asdict
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from huggingface_hub.constants import HF_HOME

from largebatch.config.data import HubText, names_in
from largebatch.data.hub import column, open_splits
from largebatch.data.preparation import check_may_prepare, num_workers_for
from largebatch.data.shards import ShardMaker, file_of
from largebatch.data.token_stream import Array, TokenStream, mapped
from largebatch.data.tokenizer import Tokenizer
from largebatch.errors import DataError
from largebatch.storage.files import read_record
from largebatch.storage.layout import read_object

if TYPE_CHECKING:
    import datasets

FORMAT = 1


class OtherPartsMissing(DataError):
    """Shards that other processes prepare are missing."""


def open_prepared(data: HubText, tokenizer: Tokenizer) -> tuple[TokenStream, TokenStream]:
    """The tokens of the training and evaluation documents, which are prepared before if that is allowed.

    Raises:
        DataError: A job may not prepare them, or they cannot be read or written.
        OtherPartsMissing: This process has prepared its part, and others have not.
    """
    names = (data.train_split, data.eval_split)
    train, evaluation = splits = [PreparedSplit(data, name, tokenizer) for name in names]
    if not all(split.manifest for split in splits):
        pairs = list(zip(splits, open_splits(data), strict=True))
        makers = [split.maker(_text_of(dataset, data.text_column)) for split, dataset in pairs if not split.manifest]
        if lacking := [maker.text.data.nbytes for maker in makers if maker.missing()]:
            check_may_prepare(data, sum(lacking))
        if missing := sum(maker.make(num_workers_for(data), data.preparation) for maker in makers):
            raise OtherPartsMissing(f"{missing} shards of other parts are still to be prepared")
    return train.open(), evaluation.open()


def _text_of(dataset: "datasets.Dataset", name: str) -> "datasets.Dataset":
    """The documents as the only column; DataError if there is no such column, or no text in it."""
    kind = dataset.features[column(dataset, name, "text_column")]
    if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view", "null"):
        others = ", ".join(dataset.column_names)
        raise DataError(f"data.text_column: the column {name!r} has {kind}, not text; the columns are {others}")
    return dataset.select_columns(name)


class PreparedSplit:
    """The folder of one split's tokens.

    Args:
        data: The recipe's section.
        split: Name of the split, in the notation of `datasets`.
        tokenizer: The section's tokenizer.
    """

    def __init__(self, data: HubText, split: str, tokenizer: Tokenizer):
        self._data, self._tokenizer = data, tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<i4")
        self._made_from = {
            **data.model_dump(mode="json", include={"path", "name", "text_column"}),
            "split": split,
            "files": _state_of_files(data, split),
            "tokenizer": tokenizer.fingerprint,
            "format": FORMAT,
        }
        key = xxhash.xxh3_64_hexdigest(json.dumps(self._made_from, sort_keys=True).encode())
        name = re.sub(r"\W+", "_", f"{Path(data.path).name}_{split}").strip("_")
        self.folder = Path(HF_HOME) / "largebatch" / f"{name}_{key}"

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest; empty unless all shards are prepared."""
        found = read_object(self.folder / "manifest.json")
        return found if "shards" in found else {}

    def maker(self, text: "datasets.Dataset") -> ShardMaker:
        """What prepares the split, from its rows with the documents as their only column."""
        return ShardMaker(self.folder, text, self._tokenizer, self._dtype, self._made_from)

    def open(self) -> TokenStream:
        """The tokens of all documents; DataError if a file is not as the manifest says.

        Checksums are compared if the preparation asks for it, and otherwise only sizes.
        """
        shards = self.manifest["shards"]
        for number, shard in enumerate(shards):
            for ending, record in shard["files"].items():
                path = file_of(self.folder, number, ending)
                is_whole = path.is_file() and path.stat().st_size == record["size"]
                if not is_whole or (self._data.preparation.verify_checksums and asdict(read_record(path)) != record):
                    raise DataError(f"{path} is damaged; remove its folder, and prepare the data again")
        return TokenStream(
            [shard["tokens"] for shard in shards],
            [shard["documents"] for shard in shards],
            partial(_map, self.folder, "tokens", self._dtype.str),
            partial(_map, self.folder, "ends", "<i8"),
            self._tokenizer.vocab_size,
        )


def _map(folder: Path, ending: str, dtype: str, number: int) -> Array:
    return mapped(file_of(folder, number, ending), dtype)


def _state_of_files(data: HubText, split: str) -> str:
    """A checksum of the names, sizes and times of a split's local files; the same for all data on the hub.

    All files of a local folder belong to each of its splits, except for README.md.
    """
    patterns, others = [str(Path(data.path).expanduser() / "**")], {"README.md"}
    if files := data.data_files:
        patterns, others = [each for name in names_in(split) for each in files.by_split[name]], set()
    paths = sorted({Path(name) for pattern in patterns for name in glob(pattern, recursive=True)})  # noqa: PTH207
    states = [(str(path), path.stat()) for path in paths if path.is_file() and path.name not in others]
    return xxhash.xxh3_64_hexdigest(repr([(name, state.st_size, state.st_mtime_ns) for name, state in states]).encode())
