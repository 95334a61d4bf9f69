"""Tells of files whose content, which may be compressed, is damaged."""

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
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
    # Damaged archives raise errors of many kinds. What the file system says has a number.
    except (ValueError, RecursionError, EOFError, OSError, zlib.error, LZMAError, BadZipFile, ZstdError) as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        told = str(error)
        # Some have a remedy.
        if ";" not in told:
            told += "; compress it without --long" if "too much memory" in told else "; correct it"
        raise DataError(f"{file} cannot be read: {told}") from error
