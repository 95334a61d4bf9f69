"""The types of columns in Parquet files, which must be the same in all of them: `datasets` would cast them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Features

from largebatch.data.columns import Uses, no_column
from largebatch.errors import DataError


def check_types(files: Iterable[Path], uses: Uses) -> None:
    """Raise DataError if a used column is missing in a file, or has values of another type than in another one.

    `datasets` casts each file to the types of the first one: the text `007` would be read as 7, and 7 as `7.0`. It also
    takes the first one's names of classes, so columns of other names for the same numbers are refused.
    """
    first: dict[str, tuple[str, Path]] = {}
    classes: dict[str, tuple[list[str], Path]] = {}
    for file in files:
        schema = pq.read_schema(file)
        for name, feature in Features.from_arrow_schema(schema).items():
            if not isinstance(feature, ClassLabel):
                continue
            names = feature.names
            numbered, other = classes.setdefault(name, (names, file))
            # Without uses, any column may be that of the labels.
            if names != numbered and (not uses or name in uses):
                raise DataError(
                    f"data.path: the classes of {name!r} are {', '.join(names)} in {file}, and {', '.join(numbered)} "
                    f"in {other}; number them alike in all files"
                )
        for name, use in uses.items():
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
