"""The types of columns in Parquet files, which must be the same in all of them: `datasets` would cast them."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from largebatch.data.columns import Uses, no_column
from largebatch.errors import DataError


def check_types(files: Iterable[Path], uses: Uses) -> None:
    """Raise DataError if a used column is missing in a file, or is text or numbers of another type than in another one.

    `datasets` casts each file to the types of the first one: the text `007` would be read as 7, and 7 as `7.0`.
    """
    first: dict[str, tuple[str, Path]] = {}
    for file in files:
        schema = pq.read_schema(file)
        for name, use in uses.items():
            if name in schema.names:
                kind = _written_alike(schema.field(name).type)
                expected, other = first.setdefault(name, (kind, file))
                if use.kind == "text" and kind != expected:
                    raise DataError(
                        f"data.{use.field}: {name!r} is of type {kind} in {file}, and {expected} in {other}; write it "
                        "with the same type into all files"
                    )
            elif use.kind != "optional":
                raise no_column(name, use.field, schema.names, file)


def _written_alike(kind: pa.DataType) -> str:
    """The name of a type, the same for those whose values are written alike."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_decimal(kind):
        return f"decimal with {kind.scale} decimal places"
    return "integer" if pa.types.is_integer(kind) else str(kind)
