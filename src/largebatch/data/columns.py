"""What the columns of a data set are used for."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from largebatch.errors import DataError


class Use(NamedTuple):
    """What a column is used for."""

    field: str  # of `data`, for messages
    kind: Literal["text", "any"] = "text"  # lists and objects are not text
    is_optional: bool = False  # whether there may be no such column


Uses = dict[str, Use]
"""The columns that are used, by their names."""


def no_column(name: str, field: str, names: Iterable[str], file: object = None) -> DataError:
    """The error that no column of these names is `name`, in a file."""
    where = f", in {file}; name one of these" if file else ""
    return DataError(f"data.{field}: no column {name!r}; the data has {', '.join(names)}{where}")
