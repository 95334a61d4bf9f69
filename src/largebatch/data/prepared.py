"""Documents as tokens in memory-mapped files, made once, from which every run reads them.

Each split of a data set has a folder, whose name depends on everything that its tokens depend on. The rows are divided
into ranges, and each range becomes a *shard*:

    00007.tokens    the tokens of the documents, each with its end-of-text token: uint16 or, beyond 2^16, int32
    00007.json      which rows these are, counts, size and checksum; written when the tokens are on disk
    manifest.json   the source of the data, and the counts and checksums of all shards; written last

A shard is made again unless its JSON says that it has these rows, so interrupted work resumes.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from glob import glob
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from huggingface_hub.constants import HF_HOME

from largebatch.config.data import HubText, names_in
from largebatch.config.problems import JsonObject
from largebatch.data.columns import Use
from largebatch.data.forked import run_forked
from largebatch.data.hub import open_splits
from largebatch.data.local_files import found_files, local_file, state_of
from largebatch.data.preparation import Preparation, write_errors
from largebatch.data.token_stream import Part, TokenStream, mapped
from largebatch.data.tokenizer import Tokenizer
from largebatch.errors import DataError
from largebatch.storage.files import read_record, replace_file, replace_json_file
from largebatch.storage.layout import read_object
from largebatch.words import counted

if TYPE_CHECKING:
    import datasets

FORMAT = 5
MIN_SHARDS = 64  # unless they would be smaller than `MIN_SHARD_BYTES`
MIN_SHARD_BYTES = 2**20  # of text
MAX_SHARD_BYTES = 2**28
BYTES_AT_ONCE = 2**20  # of documents that are tokenized, besides a single long one
ROWS_AT_ONCE = 64  # in memory
MAX_UNKNOWN = 50  # percent of tokens
SECONDS_OF_A_LEFTOVER = 600  # a temporary file that was last written so long ago belongs to nobody


class OtherPartsMissing(DataError):
    """Shards that other processes prepare are missing."""


def open_prepared(data: HubText, tokenizer: Tokenizer, preparation: Preparation) -> tuple[TokenStream, TokenStream]:
    """The tokens of the training and evaluation documents, which are prepared before if that is allowed.

    Raises:
        DataError: A job may not prepare them, or they cannot be read; or the tokenizer does not know most of them.
        UserError: They cannot be written; StorageError for a reason that may pass.
        StorageError: They cannot be written now.
        OtherPartsMissing: This process has prepared its part, and others have not.
    """
    train, evaluation = splits = prepared_splits(data, tokenizer, preparation)
    if not all(split.shards for split in splits):
        uses = {data.text_column: Use("text_column")}
        texts = [_text_of(dataset, data.text_column) for dataset in open_splits(data, preparation, uses)]
        pairs = list(zip(splits, texts, strict=True))
        lacking = [text.data.nbytes for split, text in pairs if split.missing(text)]
        if lacking:
            preparation.check(data, sum(lacking))
        missing = sum(split.make(text) for split, text in pairs)
        if missing:
            raise OtherPartsMissing(f"{missing} shards of other parts are still to be prepared")
    return train.open(), evaluation.open()


def prepared_splits(data: HubText, tokenizer: Tokenizer, preparation: Preparation) -> "list[PreparedSplit]":
    """The folders of the tokens for training and for evaluation, which may be still to be prepared.

    Raises:
        DataError: Their files are not there, or not what the config says.
    """
    names = (data.train_split, data.eval_split)
    states = _states_of_files(data, names)
    return [PreparedSplit(data, name, state, tokenizer, preparation) for name, state in zip(names, states, strict=True)]


def _text_of(dataset: "datasets.Dataset", name: str) -> "datasets.Dataset":
    """The documents as the only column; DataError if it has no text."""
    kind = dataset.features[name]
    if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view", "null"):
        others = ", ".join(dataset.column_names)
        raise DataError(f"data.text_column: the column {name!r} has {kind}, not text; the columns are {others}")
    return dataset.select_columns(name)


class PreparedSplit:
    """The folder of one split's tokens.

    Args:
        data: The recipe's section.
        split: Name of the split, in the notation of `datasets`.
        state_of_files: What tells that its local files have changed.
        tokenizer: The section's tokenizer.
        preparation: Who prepares it, and which part of it.
    """

    def __init__(self, data: HubText, split: str, state_of_files: str, tokenizer: Tokenizer, preparation: Preparation):
        self._data = data
        self._split = split
        self._tokenizer = tokenizer
        self._preparation = preparation
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<i4")
        self._made_from = {
            **data.model_dump(mode="json", include={"path", "config_name", "text_column"}),
            "split": split,
            "files": state_of_files,
            "tokenizer": tokenizer.fingerprint,
            "format": FORMAT,
        }
        key = xxhash.xxh3_64_hexdigest(json.dumps(self._made_from, sort_keys=True).encode())
        name = re.sub(r"\W+", "_", f"{Path(data.path).name}_{split}").strip("_")
        self.folder = Path(HF_HOME) / "largebatch" / f"{name}_{key}"

    @property
    def shards(self) -> list[JsonObject]:
        """The shards, as the manifest has them; empty unless all are prepared."""
        shards: list[JsonObject] = read_object(self.folder / "manifest.json").get("shards", [])
        return shards

    def open(self) -> TokenStream:
        """The tokens of all documents; DataError if a file is not as the manifest says, or most tokens are unknown.

        Checksums are compared if the preparation asks for it, and otherwise only sizes.
        """
        parts = []
        for number, shard in enumerate(self.shards):
            path = self._file(number, "tokens")
            record = shard["files"]["tokens"]
            is_whole = path.is_file() and path.stat().st_size == record["size"]
            if not is_whole or (self._preparation.verify_checksums and asdict(read_record(path)) != record):
                raise DataError(f"{path} is damaged; remove its folder, and prepare the data again")
            parts.append(Part(shard["tokens"], partial(mapped, path, self._dtype.str)))
        return TokenStream(parts, self._tokenizer.vocab_size, self._remark())

    def _remark(self) -> str | None:
        """The special tokens in the text; DataError if most of it is unknown."""
        found: dict[int, list[JsonObject]] = {}
        shards = self.shards
        for shard in shards:
            # Shards of earlier versions do not say.
            for token, counts in shard.get("special", {}).items():
                found.setdefault(int(token), []).append(counts)
        remarks = []
        for token, of_shards in found.items():
            num_documents = sum(counts["documents"] for counts in of_shards)
            told = f"{self._tokenizer.decode([token])} in {counted(num_documents, 'document')}"
            told += f" (the first is row {of_shards[0]['first']})"
            if token == self._tokenizer.unknown_token:
                num_unknown = sum(counts["tokens"] for counts in of_shards)
                percent = 100 * num_unknown / sum(shard["tokens"] for shard in shards)
                told += f", {percent:.3g} % of tokens"
                if percent > MAX_UNKNOWN:
                    raise DataError(
                        f"data.tokenizer: it does not know the text of {self._split}: {told}; write one that does"
                    )
            remarks.append(told)
        return f"{self._split}: read as special tokens: {', '.join(remarks)}" if remarks else None

    def _file(self, number: int, ending: str) -> Path:
        """A file of a shard: its "tokens" or "json"."""
        return self.folder / f"{number:05d}.{ending}"

    def make(self, text: "datasets.Dataset") -> int:
        """Make the shards of this process's part that are missing, and return how many of other parts are.

        The last part writes the manifest. If the preparation allows everything, finished shards are printed.

        Args:
            text: The split's rows, with the documents as their only column.
        """
        preparation = self._preparation
        num_workers = preparation.workers_for(self._data)
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(".*.tmp"):
                # Another process may complete or delete it meanwhile.
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > SECONDS_OF_A_LEFTOVER:
                        path.unlink()
            mine = [number for number in self.missing(text) if number % preparation.num_parts == preparation.part]
            if num_workers > 1:
                run_forked(num_workers, partial(self._make, text), mine)
            else:
                for number in mine:
                    self._make(text, number)
            missing = self.missing(text)
            if not missing and not self.shards:
                shards = [self._record(number) for number, _ in enumerate(_rows_of_shards(text))]
                counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
                about = {"made_from": self._made_from, "dtype": self._dtype.name, **counts, "shards": shards}
                replace_json_file(self.folder / "manifest.json", about)
            return len(missing)

    def _record(self, number: int) -> JsonObject:
        found = read_object(self._file(number, "json"))
        return found if found.keys() >= {"rows", "documents", "tokens", "files"} else {}

    def missing(self, text: "datasets.Dataset") -> list[int]:
        """The numbers of the shards that the folder does not have, or not with the same rows."""
        return [number for number, rows in enumerate(_rows_of_shards(text)) if self._record(number).get("rows") != rows]

    def _make(self, text: "datasets.Dataset", number: int) -> None:
        all_rows = _rows_of_shards(text)
        rows = all_rows[number]
        if self._record(number).get("rows") == rows:
            # Another job has made it meanwhile.
            return
        counts: JsonObject = {"rows": rows, "documents": rows[1] - rows[0], "empty": 0, "tokens": 0, "special": {}}
        with write_errors(self.folder):
            file = replace_file(self._file(number, "tokens"), self._encode(text, counts))
            replace_json_file(self._file(number, "json"), counts | {"files": {"tokens": asdict(file)}})
        if self._preparation.allowed == "everything":
            told = f"{counts['tokens']:,} tokens"
            # As where other rows have the text under another key.
            if counts["empty"]:
                told += f", {counts['empty']:,} of {counts['documents']:,} documents without text"
            print(f"{self.folder.name}: shard {number + 1} of {len(all_rows)}, {told}", flush=True)

    def _encode(self, text: "datasets.Dataset", counts: JsonObject) -> Iterator[memoryview]:
        """The tokens of some documents of a shard at a time, which are counted.

        Of special tokens in the text, `counts` gets how many there are, in how many documents, and the first row.
        """
        is_special = np.zeros(self._tokenizer.vocab_size, bool)
        is_special[[*self._tokenizer.special_tokens]] = True
        row, stop = counts["rows"]
        for documents in _some_documents(text, row, stop):
            encoded = self._tokenizer.encode(documents)
            tokens = np.fromiter(chain.from_iterable(encoded), self._dtype)
            ends = np.cumsum([*map(len, encoded)]) - 1
            counts["tokens"] += len(tokens)
            counts["empty"] += int(np.count_nonzero(np.diff(ends, prepend=-1) == 1))
            places = np.setdiff1d(np.flatnonzero(is_special[tokens]), ends, assume_unique=True)
            for token in sorted(set(tokens[places].tolist())):
                of_documents = np.searchsorted(ends, places[tokens[places] == token])
                first = row + int(of_documents[0])
                special = counts["special"].setdefault(str(token), {"tokens": 0, "documents": 0, "first": first})
                special["tokens"] += len(of_documents)
                special["documents"] += len(set(of_documents.tolist()))
            row += len(encoded)
            yield tokens.data


def _some_documents(text: "datasets.Dataset", start: int, stop: int) -> Iterator[list[str | None]]:
    """The documents of some rows, about `BYTES_AT_ONCE` at a time."""
    documents: list[str | None] = []
    size = 0
    row = start
    try:
        for rows in text.select(range(start, stop)).iter(ROWS_AT_ONCE):
            for document in rows[text.column_names[0]]:
                documents.append(document)
                size += len(document or "")
                if size >= BYTES_AT_ONCE:
                    yield documents
                    documents = []
                    size = 0
            row += ROWS_AT_ONCE
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.text_column: rows {row} to {min(row + ROWS_AT_ONCE, stop) - 1}: {error}; correct or remove that text"
        ) from error
    if documents:
        yield documents


def _rows_of_shards(text: "datasets.Dataset") -> list[list[int]]:
    """The first row of each shard, and the one after its last."""
    num_rows = len(text)
    num_bytes = max(text.data.nbytes, 1)
    per_shard = max(1, num_rows * min(max(num_bytes // MIN_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES) // num_bytes)
    return [[start, min(start + per_shard, num_rows)] for start in range(0, num_rows, per_shard)]


def _states_of_files(data: HubText, splits: Sequence[str]) -> list[str]:
    """Checksums of the names, sizes and times of the splits' local files; the same for all data on the hub.

    All files of a local folder belong to each of its splits, except for README.md.
    """
    if data.data_files:
        found = found_files(data)
        return [state_of(chain.from_iterable(found[name] for name in sorted(names_in(split)))) for split in splits]
    inside = sorted(glob(str(Path(data.path).expanduser() / "**"), recursive=True))  # noqa: PTH207 - without hidden ones
    paths = [path for path in map(Path, inside) if path.is_file() and path.name != "README.md"]
    return [state_of(local_file(path, "data.path") for path in paths)] * len(splits)
