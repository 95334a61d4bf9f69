"""Limits on preparing data: `largebatch prepare` prepares anything; a training job, whose GPUs would wait, only up to
1 GiB."""

import io
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from huggingface_hub.constants import HF_HOME
from numpy.typing import NDArray

from largebatch.config.data import HubOrLocal
from largebatch.errors import DataError, file_errors
from largebatch.storage.files import replace_file

MAX_BYTES_IN_A_JOB = 2**30


@dataclass(frozen=True)
class Preparation:
    """Who downloads, decodes and tokenizes the data of a recipe, and how much of it."""

    command: str = "largebatch prepare RECIPE"  # the command that prepares it, for messages
    allowed: Literal["everything", "small", "nothing"] = "small"  # "small" unless `data.prepare` says otherwise
    verify_checksums: bool = False  # whether the checksums of what is prepared are compared
    num_workers: int | None = None  # processes; None means `data.num_workers`
    part: int = 0  # of the shards, the part that this process makes
    num_parts: int = 1
    # Bytes that each section was found to need. The limit is on their sum: sources of a mixture are opened one by one.
    _needed: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def workers_for(self, data: HubOrLocal) -> int:
        """The processes that prepare this data."""
        return data.num_workers if self.num_workers is None else self.num_workers

    def check(self, data: HubOrLocal, num_bytes: int) -> None:
        """Raise NotPrepared if so many bytes would have to be downloaded, decoded or tokenized, and may not be.

        Those of sections that were checked before are added to them.
        """
        section = data.model_dump_json()
        self._needed[section] = max(num_bytes, self._needed.get(section, 0))
        total = sum(self._needed.values())
        by_a_job = data.prepare == "allow" or (data.prepare is None and total <= MAX_BYTES_IN_A_JOB)
        if self.allowed == "everything" or (self.allowed == "small" and by_a_job):
            return
        if self.allowed == "nothing":
            home = next(path for path in (Path(HF_HOME), *Path(HF_HOME).absolute().parents) if path.exists())
            what = (
                "a job does that when it starts" if by_a_job else f"a job would refuse that; run `{self.command}` first"
            )
            raise NotPrepared(
                f"about {num_bytes / 2**20:,.1f} MiB of data must still be prepared: {what}; "
                f"{shutil.disk_usage(home).free / 2**30:,.0f} GiB are free in {home}",
                job_would_refuse=not by_a_job,
            )
        raise NotPrepared(
            f"data.prepare: {total / 2**20:,.1f} MiB would have to be prepared while this job's devices wait; run "
            f'`{self.command}` with the same overrides and HF_HOME first, or write "allow"'
        )


class NotPrepared(DataError):
    """Data is missing that may not be prepared here."""

    def __init__(self, message: str, job_would_refuse: bool = True):
        super().__init__(message)
        self.job_would_refuse = job_would_refuse


def write_errors(folder: Path) -> AbstractContextManager[None]:
    """Raise OSErrors of the block as errors that name a folder of prepared data, as `file_errors` does."""
    return file_errors(f"{folder} cannot be written", f"make it writable, or set HF_HOME to a copy of {HF_HOME}")


def kept(name: str, make: Callable[[], NDArray[np.int64]], shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """An array that is made from data once, and then read as a map of its file; the name has a fingerprint of the data.

    Whenever the process stops, the file is whole or absent.

    Raises:
        DataError: The file is damaged, or its items do not have this shape.
    """
    path = Path(HF_HOME) / "largebatch" / f"{name}.npy"
    if not path.is_file():
        content = io.BytesIO()
        np.save(content, make())
        with write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content.getvalue())
    with suppress(ValueError, EOFError):
        array: NDArray[np.int64] = np.load(path, mmap_mode="r")
        if array.dtype == np.int64 and array.shape[1:] == shape:
            return array
    raise DataError(f"{path} is damaged; remove it, and prepare the data again")
