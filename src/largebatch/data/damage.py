"""Tells of files whose content, which may be compressed, is damaged."""

import sys
import zlib
from bz2 import BZ2File
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError, LZMAFile
from zipfile import BadZipFile

from largebatch.errors import DataError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError
else:
    from backports.zstd import ZstdError


@contextmanager
def damage_told(file: object) -> Iterator[None]:
    """Raise DataError with the file's name for what its content, which may be compressed, raises when it is read."""
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        # The content; what raises it says what to write.
        raise DataError(f"{file} cannot be read: {error}") from error
    except (EOFError, OSError, zlib.error, LZMAError, BadZipFile, ZstdError) as error:
        # What the file system says has a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{file} cannot be read: {error}; compress it again (zstd: without --long)") from error


def tell_of_the_rest(opened: object) -> None:
    """Make Python's readers of bz2 and xz raise an error for what follows a stream and is none.

    They would leave it out, with all streams after it.
    """
    if isinstance(opened, BZ2File | LZMAFile):
        # The errors that it takes for the end; readers of other formats have none.
        opened._buffer.raw._trailing_error = ()  # type: ignore[union-attr]
