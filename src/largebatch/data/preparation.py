"""Limits on preparing data: `largebatch prepare` prepares anything; a training job, whose GPUs would wait, only up to
1 GiB."""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from huggingface_hub.constants import HF_HOME

from largebatch.config import RecipeConfig
from largebatch.config.data import HubOrLocal, Preparation
from largebatch.errors import DataError, file_errors

MAX_BYTES_IN_A_JOB = 2**30

Config = TypeVar("Config", bound=RecipeConfig)


def with_preparation(config: Config, preparation: Preparation) -> Config:
    """A copy of the config, whose data is prepared in this way if its kind needs preparation."""
    if not isinstance(config.data, HubOrLocal):
        return config
    return config.model_copy(update={"data": config.data.prepared_by(preparation)})


def num_workers_for(data: HubOrLocal) -> int:
    """The processes that prepare this data."""
    asked_for = data.preparation.num_workers
    return data.num_workers if asked_for is None else asked_for


def write_errors(folder: Path) -> AbstractContextManager[None]:
    """Raise OSErrors of the block as errors that name a folder of prepared data, as `file_errors` does."""
    return file_errors(f"{folder} cannot be written", "set HF_HOME to another folder")


class NotPrepared(DataError):
    """Data is missing that may not be prepared here."""

    job_would_refuse = True  # by a job


def check_may_prepare(data: HubOrLocal, num_bytes: int) -> None:
    """Raise NotPrepared if so many bytes would have to be downloaded, decoded or tokenized, and may not be.

    Those of the other sources of a mixture are added to them.
    """
    current, total = data.preparation, num_bytes
    if current.needed is not None:
        section = data.model_dump_json()
        current.needed[section] = max(num_bytes, current.needed.get(section, 0))
        total = sum(current.needed.values())
    by_a_job = data.prepare == "allow" or (data.prepare is None and total <= MAX_BYTES_IN_A_JOB)
    if current.allowed == "everything" or (current.allowed == "small" and by_a_job):
        return
    if current.allowed == "nothing":
        home = next(path for path in (Path(HF_HOME), *Path(HF_HOME).absolute().parents) if path.exists())
        what = (
            "a job does that when it starts" if by_a_job else f"a job would refuse that; run `{current.command}` first"
        )
        missing = NotPrepared(
            f"about {num_bytes / 2**20:,.1f} MiB of data must still be prepared: {what}; "
            f"{shutil.disk_usage(home).free / 2**30:,.0f} GiB are free in {home}"
        )
        missing.job_would_refuse = not by_a_job
        raise missing
    raise NotPrepared(
        f"data.prepare: {total / 2**20:,.1f} MiB would have to be prepared while this job's devices wait; run "
        f'`{current.command}` with the same overrides and HF_HOME first, or write "allow"'
    )
