"""What the columns of a data set are used for."""

from collections.abc import Iterable
from typing import Literal, NamedTuple
from unicodedata import normalize

from largebatch.errors import DataError

MAX_SHOWN = 80  # letters of a name


class Use(NamedTuple):
    """What a column is used for."""

    field: str  # of `data`, for messages
    kind: Literal["text", "string", "any"] = "text"  # lists and objects are not text; of JSON, numbers are not strings
    is_optional: bool = False  # whether there may be no such column


Uses = dict[str, Use]
"""The columns that are used, by their names."""


def no_column(name: str, field: str, names: Iterable[str], file: object = None) -> DataError:
    """The error that no column of these names is `name`, in a file."""
    names = list(names)
    # Letters with accents of their own, as in names of macOS, look like those that have them.
    is_alike = normalize("NFC", name) in [normalize("NFC", each) for each in names]
    # An open quote takes in the rest of a file.
    shown, *others = (each[:MAX_SHOWN] for each in map(ascii if is_alike else repr, [name, *names]))
    where = f", in {file}; name one of these" if file else ""
    return DataError(f"data.{field}: no column {shown}; the data has {', '.join(others)}{where}")
