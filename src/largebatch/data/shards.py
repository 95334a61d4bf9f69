"""Makes the shards of a split: ranges of its documents as files of tokens; `data.prepared` describes them."""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from largebatch.config.data import Preparation
from largebatch.data.forked import in_processes
from largebatch.data.preparation import cannot_be_written
from largebatch.data.tokenizer import Tokenizer
from largebatch.errors import DataError
from largebatch.storage.files import replace_json_file, sync_folder, write_file
from largebatch.storage.layout import read_object

if TYPE_CHECKING:
    import datasets

MIN_SHARDS = 64  # unless they would be smaller than `MIN_SHARD_BYTES`
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 2**20, 2**28  # of text
BYTES_AT_ONCE, MAX_ROWS_AT_ONCE = 2**20, 4096  # of documents that are in memory, besides a single long one
SECONDS_OF_A_LEFTOVER = 600  # a temporary file that was last written so long ago belongs to nobody


@dataclass(frozen=True)
class ShardMaker:
    """Turns a split's documents into shards in a folder.

    Args:
        folder: The split's folder.
        text: The split's rows, with the documents as their only column.
        tokenizer: Encodes them.
        dtype: Type of the tokens.
        made_from: The source of the data, for the manifest.
    """

    folder: Path
    text: "datasets.Dataset"
    tokenizer: Tokenizer
    dtype: np.dtype[Any]
    made_from: Mapping[str, Any]

    def make(self, num_workers: int, preparation: Preparation) -> int:
        """Make the shards of this process's part that are missing, and return how many of other parts are.

        The last part writes the manifest.

        Args:
            num_workers: Number of processes; up to 1, this process makes them.
            preparation: Which part is this process's. If it allows everything, finished shards are printed.

        Raises:
            DataError: A file cannot be written, or a process was killed.
            StorageError: A file cannot be written now.
        """
        with _write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(".*.tmp"):
                if time.time() - path.stat().st_mtime > SECONDS_OF_A_LEFTOVER:
                    path.unlink(missing_ok=True)
            mine = [number for number in self.missing() if number % preparation.num_parts == preparation.part]
            make = partial(self._make, prints=preparation.allowed == "everything")
            if num_workers > 1:
                in_processes(num_workers, make, mine)
            else:
                for number in mine:
                    make(number)
            missing = self.missing()
            if not missing:
                shards = [self._record(number) for number, _ in enumerate(self._rows())]
                counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
                about = {"made_from": self.made_from, "dtype": self.dtype.name, **counts, "shards": shards}
                replace_json_file(self.folder / "manifest.json", about)
            return len(missing)

    def _record(self, number: int) -> dict[str, Any]:
        found = read_object(file_of(self.folder, number, "json"))
        return found if found.keys() >= {"rows", "documents", "tokens", "files"} else {}

    def missing(self) -> list[int]:
        """The numbers of the shards that the folder does not have, or not with the same rows."""
        return [number for number, rows in enumerate(self._rows()) if self._record(number).get("rows") != rows]

    def _rows(self) -> Iterator[dict[str, int]]:
        """The rows of each shard, and how many rows and bytes the split has, which tell other data apart."""
        num_rows, num_bytes = len(self.text), max(self.text.data.nbytes, 1)
        each = max(1, num_rows * min(max(num_bytes // MIN_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES) // num_bytes)
        for start in range(0, num_rows, each):
            stop = min(start + each, num_rows)
            yield {"start": start, "stop": stop, "rows_of_split": num_rows, "bytes_of_split": num_bytes}

    def _make(self, number: int, prints: bool) -> None:
        all_rows = list(self._rows())
        rows = all_rows[number]
        if self._record(number).get("rows") == rows:
            # Another job has made it meanwhile.
            return
        ends = [np.zeros(1, np.int64)]
        temporary = self.folder / f".{number:05d}.{secrets.token_hex(4)}.tmp"
        files = {}
        with _write_errors(self.folder):
            try:
                for ending, parts in (("tokens", self._encode(rows, ends)), ("ends", _joined(ends))):
                    files[ending] = asdict(write_file(temporary, parts))
                    temporary.rename(file_of(self.folder, number, ending))
            finally:
                temporary.unlink(missing_ok=True)
            sync_folder(self.folder)
            counts = {"rows": rows, "documents": rows["stop"] - rows["start"], "tokens": int(ends[-1][-1])}
            replace_json_file(file_of(self.folder, number, "json"), counts | {"files": files})
        if prints:
            print(f"{self.folder.name}: shard {number + 1} of {len(all_rows)}, {counts['tokens']:,} tokens", flush=True)

    def _encode(self, rows: dict[str, int], ends: list[NDArray[np.int64]]) -> Iterator[memoryview]:
        """The tokens of some documents at a time, whose ends are added to `ends`."""
        # Slow to import, and a run that finds its data prepared does without.
        import pyarrow
        from pyarrow import compute

        text = self.text.with_format("arrow")
        for start in range(rows["start"], rows["stop"], MAX_ROWS_AT_ONCE):
            column = text[start : min(start + MAX_ROWS_AT_ONCE, rows["stop"])].column(0).cast(pyarrow.large_string())
            sizes = np.cumsum(compute.binary_length(column).fill_null(0).to_numpy())
            for part in np.split(np.arange(len(column)), np.flatnonzero(np.diff(sizes // BYTES_AT_ONCE)) + 1):
                try:
                    documents = self.tokenizer.encode(column.slice(part[0], len(part)).to_pylist())
                except UnicodeDecodeError as error:
                    where = f"rows {start + part[0]} to {start + part[-1]}"
                    raise DataError(f"data.text_column: {where}: {error}; correct or remove that text") from error
                ends.append(ends[-1][-1] + np.cumsum([len(document) for document in documents]))
                yield np.fromiter(chain.from_iterable(documents), self.dtype).data


def _joined(ends: list[NDArray[np.int64]]) -> Iterator[memoryview]:
    """All ends, once they are asked for."""
    yield np.concatenate(ends[1:]).data


def file_of(folder: Path, number: int, ending: str) -> Path:
    """A file of a shard: its "tokens", "ends" or "json"."""
    return folder / f"{number:05d}.{ending}"


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_be_written(folder, error) from error
