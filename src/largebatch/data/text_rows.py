"""CSV and JSON files as rows of text, exactly as it stands in them.

The readers of `datasets` guess types: they read `00001` as 1, `NA` as nothing, and a date in quotes as a time. Here
Python's `csv` and `json` read the files. Cells, and strings of JSON, are kept as they are; numbers as they are written;
lists and objects as their JSON.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import IO, Any, Literal

import datasets
import fsspec

from largebatch.errors import DataError

READERS = ("csv", "json")
"""Names of the builders of `datasets` whose files are read here."""
FORMAT = "1"
ROWS_WITH_ALL_COLUMNS = 1000  # from which the columns of a file are known

Row = dict[str, Any]
Uses = dict[str, Literal["text", "any", "optional"]]
"""The columns that are needed: as "text", which lists and objects are not, or as "any" JSON; or used if there are any.
"""


@dataclass
class TextRowsConfig(datasets.BuilderConfig):  # type: ignore[misc]  # `datasets` has no types
    """What decides the rows of files, besides their content."""

    reader: str = "json"  # one of `READERS`
    separator: str = ","  # of the cells of a CSV
    columns: tuple[str, ...] = ()  # all columns
    uses: Uses = field(default_factory=dict)


class TextRows(datasets.GeneratorBasedBuilder):  # type: ignore[misc]
    """Rows of files as columns of strings; null where a row of JSON has no such key, or null."""

    BUILDER_CONFIG_CLASS = TextRowsConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features(dict.fromkeys(self.config.columns, _STRING)))

    def _split_generators(self, _: object) -> list[datasets.SplitGenerator]:
        # `datasets` divides lists among processes.
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"files": list(files)})
            for split, files in self.config.data_files.items()
        ]

    def _generate_examples(self, files: Sequence[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
        for file in files:
            names: set[str] = set()
            for line, row in rows_of(file, self.config):
                where = f"{file}: line {line}"
                names |= row.keys()
                yield where, {name: self._text(where, name, row.get(name)) for name in self.config.columns}
            for name, use in self.config.uses.items():
                # A column that the first file lacks is refused with the name of its field.
                if use != "optional" and name in self.config.columns and name not in names:
                    raise DataError(f"{file} has no column {name!r}; it has {', '.join(sorted(names)) or 'no rows'}")

    def _text(self, where: str, name: str, value: Any) -> str | None:
        if value is None:
            return None
        if isinstance(value, list | dict) and self.config.uses.get(name) == "text":
            raise DataError(f"{where}: {name!r} holds {json.dumps(value)[:60]}, neither text nor a number; write text")
        if isinstance(value, _Float):
            return value.literal
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: {name!r} is not text: {error}; correct or remove it") from None
        return text


_STRING = datasets.Value("string")


def text_rows(builder: datasets.DatasetBuilder, uses: Uses) -> TextRows:
    """The builder of the rows of another builder's local files, which is one of `READERS`.

    Raises:
        DataError: The first rows cannot be read.
    """
    files = builder.config.data_files
    config = TextRowsConfig(reader=builder.name, separator=getattr(builder.config, "sep", ","))
    names: dict[str, None] = {}
    for of_split in files.values():
        for _, row in islice(rows_of(of_split[0], config), ROWS_WITH_ALL_COLUMNS):
            names |= dict.fromkeys(row)
    return TextRows(
        dataset_name=builder.dataset_name,
        hash=FORMAT,
        data_files=files,
        reader=config.reader,
        separator=config.separator,
        columns=tuple(names | {name: None for name, use in uses.items() if use == "optional"}),
        uses=uses,
    )


def rows_of(file: str, config: TextRowsConfig) -> Iterator[tuple[int, Row]]:
    """The rows of a file, which may be compressed, with the numbers of their lines, in a list of their places.

    Raises:
        DataError: The file is not in the reader's format, or has something twice.
    """
    with fsspec.open(file, "rb", compression="infer") as opened:
        file_of_lines = io.BufferedReader(opened)  # those of zstd have no lines
        rows = _csv_rows(file_of_lines, config.separator) if config.reader == "csv" else _json_rows(file_of_lines)
        try:
            yield from rows
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file} cannot be read: {error}; correct it") from error


def _csv_rows(file: IO[bytes], separator: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(sys.maxsize)
    # A spreadsheet's CSV may begin with a byte order mark.
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=separator, strict=True)
    try:
        names = next(reader, [])
        _check_names(names)
        for cells in reader:
            # As csv.DictReader does, leave out empty lines.
            if cells and len(cells) != len(names):
                raise ValueError(f"it has {len(cells)} cells, but the header has {len(names)}")
            if cells:
                yield reader.line_num, dict(zip(names, cells, strict=True))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _json_rows(file: IO[bytes]) -> Iterator[tuple[int, Row]]:
    # Strings may have characters at which `splitlines` would split.
    lines = enumerate(iter(file.readline, b""), 1)
    number, first = next(((number, line) for number, line in lines if line.strip()), (1, b""))
    first = first.removeprefix(b"\xef\xbb\xbf")
    rows: Iterator[tuple[int, Any]]
    if first.lstrip().startswith(b"["):
        rows = enumerate(_parsed(b"".join([first, *(line for _, line in lines)]), 1), 1)
    else:
        following = ((number, line) for number, line in chain([(number, first)], lines) if line.strip())
        rows = ((number, _parsed(line, number)) for number, line in following)
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is {json.dumps(row)[:60]}, not an object with a key for each column")
        yield number, row


def _parsed(text: bytes, line: int) -> Any:
    try:
        return json.loads(text.decode(), parse_float=_Float, parse_constant=_Float, object_pairs_hook=_object)
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from None


class _Float(float):
    """A number, and how it is written."""

    literal: str

    def __new__(cls, literal: str) -> "_Float":
        number = super().__new__(cls, literal)
        number.literal = literal
        return number


def _object(pairs: Sequence[tuple[str, Any]]) -> Row:
    _check_names([name for name, _ in pairs])
    return dict(pairs)


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice, so one of its values would be lost")
