"""CSV, JSON and plain text as rows of text, exactly as it stands in the files.

The readers of `datasets` guess types: they read `00001` as 1, `NA` as nothing, and a date in quotes as a time. Here
Python's `csv` and `json` read the files. Cells, and strings of JSON, are kept as they are; numbers as they are written;
lists and objects as their JSON. Errors name the file and the line.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, islice, tee
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import datasets
import fsspec

from largebatch.data.columns import Use, Uses, no_column
from largebatch.data.damage import damage_told, tell_of_the_rest
from largebatch.data.not_text import not_text_in
from largebatch.errors import DataError
from largebatch.words import printable

READERS = ("csv", "json", "text")
"""Names of the builders of `datasets` whose files are read here."""
FORMAT = "6"
SEPARATORS = ",;\t|"  # of the cells of a CSV
COMPRESSED = {b"\x1f\x8b": ".gz", b"(\xb5/\xfd": ".zst", b"\xfd7zXZ": ".xz"}
"""How compressed files begin, as no text in UTF-8 does, and what their names must end with."""

Row = dict[str, Any]


@dataclass
class TextRowsConfig(datasets.BuilderConfig):  # type: ignore[misc]  # `datasets` has no types
    """What decides the rows of files, besides their content."""

    reader: str = "json"  # one of `READERS`
    uses: Uses = field(default_factory=dict)


class TextRows(datasets.GeneratorBasedBuilder):  # type: ignore[misc]
    """The columns of files that are used, as strings; null where a row of JSON has no such key, or null."""

    BUILDER_CONFIG_CLASS = TextRowsConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            features=datasets.Features(dict.fromkeys(self.config.uses, datasets.Value("string")))
        )

    def _split_generators(self, _: object) -> list[datasets.SplitGenerator]:
        # `datasets` divides lists among processes.
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"files": list(files)})
            for split, files in self.config.data_files.items()
        ]

    def first_columns(self) -> list[str]:
        """The columns of the first thousand rows."""
        files = next(iter(self.config.data_files.values()))
        rows = islice(chain.from_iterable(rows_of(file, self.config) for file in files), 1_000)
        return [*dict.fromkeys(chain.from_iterable(row for _, row in rows))]

    def separators(self) -> list[str]:
        """What separates the cells of the files that have some."""
        files = {*chain.from_iterable(self.config.data_files.values())} if self.config.reader == "csv" else ()
        return sorted({_separator_of(file, self.config.uses) for file in files} - {""})

    def _generate_examples(self, files: Sequence[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
        uses: Uses = self.config.uses
        for file in files:
            names: dict[str, None] = {}
            for place, row in rows_of(file, self.config):
                where = f"{file}: {place}"
                names |= dict.fromkeys(row)
                yield where, {name: _text(where, name, use, row.get(name)) for name, use in uses.items()}
            for name, use in uses.items():
                if names and not use.is_optional and name not in names:
                    raise no_column(name, use.field, names, file)


def _text(where: str, name: str, use: Use, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, _Number) and use.kind != "string":
        return value.literal
    try:
        text = value if isinstance(value, str) else _as_json(value)
    except ValueError as error:
        raise DataError(f"{where}: {name!r} holds {error}") from None
    if what := not_text_in(text):
        raise DataError(f"{where}: {name!r} has {what}, which is not text; remove it, or save the file as UTF-8")
    is_text = isinstance(value, str) or (use.kind == "text" and not isinstance(value, list | dict))
    if use.kind != "any" and not is_text:
        raise DataError(f"{where}: {name!r} holds {text[:60]}, which is not text; write text")
    return text


def with_exact_text(builder: datasets.DatasetBuilder, uses: Uses) -> datasets.DatasetBuilder:
    """The builder, or for local texts, CSV and JSON one that does not guess types."""
    files = [file for of_split in (builder.config.data_files or {}).values() for file in of_split]
    if builder.name not in READERS or any("://" in file for file in files):
        return builder
    return TextRows(
        dataset_name=builder.dataset_name,
        hash=FORMAT,
        data_files=builder.config.data_files,
        reader=builder.name,
        uses=uses,
    )


def _separator_of(file: str, uses: Uses) -> str:
    """The separator with which the header of a CSV has the columns that it must have; nothing if it has no header.

    Raises:
        DataError: There is none.
    """
    csv.field_size_limit(sys.maxsize)
    needed = {name: use for name, use in uses.items() if not use.is_optional}
    longest: list[str] = []
    with fsspec.open(
        file, "rt", compression="infer", encoding="utf-8-sig", errors="surrogateescape", newline=""
    ) as text:
        for separator, lines in zip(SEPARATORS, tee(text, len(SEPARATORS)), strict=True):
            header = _header(csv.reader(lines, delimiter=separator))
            if not header:
                return ""
            if needed.keys() <= {*header}:
                return separator
            longest = max(longest, header, key=len)
    _check_names(longest, ())
    missing = next(name for name in needed if name not in longest)
    raise no_column(missing, needed[missing].field, longest, f"the header of {file}, its first row")


def _header(reader: Iterator[list[str]]) -> list[str]:
    """The first row of a CSV; a line "sep=;" above it names the separator to Excel."""
    return next((cells for cells in reader if cells and not cells[0].startswith("sep=")), [])


def rows_of(file: str, config: TextRowsConfig) -> Iterator[tuple[str, Row]]:
    """The rows of a file, which may be compressed, each with its place, such as "line 3".

    Raises:
        DataError: The file is not in the reader's format, or has something twice.
    """
    with damage_told(file):
        if _is_archive(Path(file)):
            raise DataError(f"{file} holds other files; unpack it")
        with fsspec.open(file, "rb", compression="infer") as opened:
            tell_of_the_rest(opened)
            file_of_lines = io.BufferedReader(opened)  # those of zstd have no lines
            start = file_of_lines.peek(8)
            for first, ending in COMPRESSED.items():
                if start.startswith(first):
                    raise ValueError(f"it is compressed; end its name with {ending}")
            if config.reader == "text":
                for number, line in enumerate(_lines(file_of_lines), 1):
                    yield f"line {number}", {"text": line.removesuffix("\n")}
            elif config.reader == "json":
                yield from _json_rows(file_of_lines)
            elif separator := _separator_of(file, config.uses):
                yield from _csv_rows(file_of_lines, separator, config.uses)


def _is_archive(path: Path) -> bool:
    """Whether a file is a tar, or a zip that does not hold exactly one file."""
    if ".tar" in path.suffixes[-2:] or path.suffix == ".tgz":
        return True
    if path.suffix != ".zip":
        return False
    # macOS adds files of its own.
    members = [name for name in ZipFile(path).namelist() if not name.startswith("__MACOSX/")]
    return len(members) != 1


def _lines(file: IO[bytes], newline: str | None = None) -> Iterator[str]:
    """The lines of a text without byte order marks, which joined files have within."""
    # Bytes of other encodings are told with their row.
    for line in io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline=newline):
        yield line.removeprefix("\ufeff")


def _csv_rows(file: IO[bytes], separator: str, uses: Uses) -> Iterator[tuple[str, Row]]:
    reader = csv.reader(_lines(file, ""), delimiter=separator, strict=True)
    try:
        names = _header(reader)
        # Spreadsheets leave columns without a name.
        _check_names(names, uses)
        # Joined files may have another order; numbers in another one are data.
        is_of_words = all(re.search(r"[^\W\d]", name) for name in names)
        for cells in reader:
            # As csv.DictReader does, leave out empty lines.
            if not cells:
                continue
            if len(cells) != len(names):
                raise ValueError(
                    f"it has {len(cells)} cells, but the header has {len(names)}, "
                    f"if they are separated by {separator!r}; correct it (quotes count only right after a separator)"
                )
            # Only rows that may be names are sorted.
            may_be_names = len(names) > 1 and cells[0] in names
            if may_be_names and (cells == names or (is_of_words and sorted(cells) == sorted(names))):
                raise ValueError(
                    "it has the names of the columns again, as in joined files; remove it or, if it is data, "
                    "rename the columns"
                )
            # In a TSV, a quote that is only text takes all rows up to the next one into its cell.
            if separator == "\t" and any(
                cell.count("\t") >= len(names) - 1 and re.search("[\r\n]", cell) for cell in cells
            ):
                raise ValueError("a cell in quotes has tabs and line breaks, as rows have; write a CSV or JSON lines")
            yield f"line {reader.line_num}", dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}; correct it") from error
    except ValueError as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _json_rows(file: IO[bytes]) -> Iterator[tuple[str, Row]]:
    numbered = enumerate((line.removeprefix(b"\xef\xbb\xbf") for line in file), 1)
    lines = ((f"line {number}", line) for number, line in numbered if line.strip())
    place, first = next(lines, ("", b""))
    rows: Iterator[tuple[str, Any]]
    if first.lstrip().startswith(b"["):
        items = _parsed(first + file.read(), "the list")
        rows = ((f"item {number} of the list", item) for number, item in enumerate(items, 1))
    else:
        rows = ((place, _parsed(line, place)) for place, line in chain([(place, first)] if first else [], lines))
    for place, row in rows:
        if not isinstance(row, dict):
            what = printable(_as_json(row)[:60])
            raise ValueError(f"{place} is {what}, not an object with a key for each column")
        yield place, row


def _parsed(text: bytes, place: str) -> Any:
    try:
        return parse_json(text.decode(), _Number)
    except (ValueError, RecursionError) as error:
        remedies = {
            json.JSONDecodeError: "; write one object per line, or one list",
            UnicodeDecodeError: "; save it as UTF-8",
            RecursionError: "; nest less",
        }
        raise ValueError(f"{place}: {error}{remedies.get(type(error), '')}") from None


@dataclass
class _Number:
    """A number that is not whole, as it is written."""

    literal: str


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda number: _exact(number.literal))


def _exact(literal: str) -> float:
    """The number; raise ValueError if it would have other digits."""
    number = float(literal)
    # Some programs write 17 digits of any number.
    if Decimal(literal) not in (Decimal(str(number)), Decimal(f"{number:.17g}")):
        raise ValueError(f"the number {literal}, which would become {number}; write fewer digits, or a text")
    return number


def parse_json(text: str, number: Callable[[str], Any] = _exact) -> Any:
    """The value of a text in JSON.

    Raises:
        ValueError: It is not JSON, or has something that would be lost: a key twice, or digits of a number.
    """
    return json.loads(text, parse_float=number, object_pairs_hook=_object)


def _object(pairs: Sequence[tuple[str, Any]]) -> Row:
    names = [name for name, _ in pairs]
    _check_names(names, names)
    return dict(pairs)


def _check_names(names: Sequence[str], used: Iterable[str]) -> None:
    if any("\udc80" <= letter <= "\udcff" for name in names for letter in name):
        raise ValueError("its names are not in UTF-8; save it as UTF-8")
    if len(set(names)) < len(names) and (twice := [name for name in used if names.count(name) > 1]):
        raise ValueError(f"{twice[0]!r} occurs twice, so one of its values would be lost; rename one")
