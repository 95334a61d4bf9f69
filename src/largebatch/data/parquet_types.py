"""The columns of Parquet and Arrow files that are used, and their types, which must be the same in all files."""

from collections.abc import Container, Iterable, Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Features
from datasets.builder import Key
from datasets.packaged_modules.parquet.parquet import Parquet

from largebatch.data.columns import Uses, no_column
from largebatch.errors import DataError, reason_of

ROWS_AT_ONCE = 1000  # of a file, in memory


class UsedColumns(Parquet):  # type: ignore[misc]  # `datasets` has no types
    """The columns of the config's features; others may be of any type, or only in some files."""

    def first_columns(self) -> list[str]:
        """All columns of the first file."""
        names: list[str] = pq.read_schema(next(iter(self.config.data_files.values()))[0]).names
        return names

    def _generate_tables(self, files: Sequence[str], **_: object) -> Iterator[tuple[Key, pa.Table]]:
        for number, file in enumerate(files):
            with pq.ParquetFile(file) as opened:
                names = [name for name in opened.schema_arrow.names if name in self.config.features]
                for part, batch in enumerate(opened.iter_batches(ROWS_AT_ONCE, columns=names)):
                    # A struct with a part of the same name, as `a` with `b` beside a column `a.b`, is read, too.
                    table = pa.Table.from_batches([batch]).select(names)
                    # Columns that are not in this file become null.
                    yield Key(number, part), self._cast_table(table)


def with_used_columns(builder: datasets.DatasetBuilder, files: Iterable[Path], uses: Uses) -> UsedColumns:
    """A builder of the same local files that reads only the used columns, with the types of the first file with them.

    Raises:
        DataError: A used column is of a type that `datasets` does not read.
    """
    features: dict[str, object] = {}
    for file in files:
        if missing := uses.keys() - features.keys():
            features |= _features(file, pq.read_schema(file), missing)
    return UsedColumns(
        dataset_name=builder.dataset_name,
        hash=builder.hash,
        data_files=builder.config.data_files,
        features=Features(features),
    )


def check_types(files: Iterable[Path], uses: Uses | None) -> None:
    """Raise DataError if a used column is missing in a file, or has values of another type than in another one.

    `datasets` casts each file to the types of the first one: the text `007` would be read as 7, and 7 as `7.0`. It also
    takes the first one's names of classes, so columns of other names for the same numbers are refused. Without uses,
    any column may be used, and `datasets` refuses those that the first file lacks.
    """
    columns: list[str] = []
    first: dict[str, tuple[str, Path]] = {}
    classes: dict[str, tuple[list[str], Path]] = {}
    for file in files:
        schema = _schema_of(file)
        for name, feature in _features(file, schema, schema.names if uses is None else uses).items():
            if not isinstance(feature, ClassLabel):
                continue
            names = feature.names
            numbered, other = classes.setdefault(name, (names, file))
            if names != numbered:
                raise DataError(
                    f"data.path: the classes of {name!r} are {', '.join(names)} in {file}, and {', '.join(numbered)} "
                    f"in {other}; number them alike in all files"
                )
        columns = columns or schema.names
        if uses is None and (more := [name for name in schema.names if name not in columns]):
            raise DataError(f"data.path: {file} has a column {more[0]!r}, and the first file has not; drop it")
        for name, use in (uses or {}).items():
            if name in schema.names:
                for part, kind in _values(name, schema.field(name).type):
                    expected, other = first.setdefault(part, (kind, file))
                    # Where all are missing, there is nothing to be cast.
                    if kind not in (expected, "null"):
                        raise DataError(
                            f"data.{use.field}: {part!r} is of type {kind} in {file}, and {expected} in {other}; write "
                            "it with the same type into all files"
                        )
            elif not use.is_optional:
                raise no_column(name, use.field, schema.names, file)


def _schema_of(file: Path) -> pa.Schema:
    if file.suffix != ".arrow":
        with pq.ParquetFile(file) as opened:
            _check_not_joined(file, opened.metadata)
            return opened.schema_arrow
    with pa.memory_map(str(file)) as opened:
        try:
            return pa.ipc.open_stream(opened).schema
        # Feather's.
        except pa.ArrowInvalid:
            return pa.ipc.open_file(opened).schema


def _check_not_joined(file: Path, metadata: pq.FileMetaData) -> None:
    """Raise DataError for files joined by `cat`: bytes of the first would be read by the metadata of the last."""
    end = 0
    if metadata.num_row_groups:
        last = metadata.row_group(metadata.num_row_groups - 1)
        for each in map(last.column, range(last.num_columns)):
            end = max(end, (each.dictionary_page_offset or each.data_page_offset) + each.total_compressed_size)
    # The last file's metadata count from its own start: what is left is the size of those before it, and of an index.
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        if content.find(b"PAR1PAR1", 0, len(content) - metadata.serialized_size - end) >= 0:
            raise DataError(
                f"data.path: {file} was made of several Parquet files by `cat`, which cannot be read as one; keep them "
                "apart"
            )


def _features(file: Path, schema: pa.Schema, names: Container[str]) -> Features:
    """The types that `datasets` has for the columns of these names."""
    features: dict[str, object] = {}
    for column in schema:
        if column.name in names:
            try:
                features |= Features.from_arrow_schema(pa.schema([column], schema.metadata))
            except ValueError as error:
                raise DataError(
                    f"data.path: the column {column.name!r} of {file} is of type {column.type}, which `datasets` does "
                    f"not read ({reason_of(error)}); drop it, or write it as text"
                ) from error
    return Features(features)


def _values(name: str, kind: pa.DataType) -> Iterator[tuple[str, str]]:
    """Yield the name of a column, or of each part of its lists and structures, and the type of the values.

    Types whose values are written alike have the same name.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_nested(kind):
        for number in range(kind.num_fields):
            part = kind.field(number)
            # Writers name the elements of a list differently.
            yield from _values(f"{name}.{part.name}" if pa.types.is_struct(kind) else name, part.type)
    elif pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        yield name, "string"
    elif pa.types.is_large_binary(kind):
        yield name, "binary"
    elif pa.types.is_decimal(kind):
        yield name, f"decimal with {kind.scale} decimal places"
    else:
        yield name, "integer" if pa.types.is_integer(kind) else str(kind)
