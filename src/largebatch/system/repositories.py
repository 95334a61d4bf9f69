"""Data sets, models and tokenizers: in a local folder, or in a repository on the hub, at one of its revisions."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

from largebatch.errors import UserError, reason_of

RepositoryKind = Literal["dataset", "model"]
COMMIT = re.compile(r"[0-9a-f]{40}")
SECONDS = 30  # for an answer of the hub: a network may swallow what is sent


class Place(NamedTuple):
    """Where something is."""

    name: str  # a local folder, or the id of a repository on the hub
    revision: str | None  # a commit, tag or branch of the repository; None for a folder

    @property
    def folder(self) -> Path | None:
        """The local folder, if it is one."""
        return Path(self.name) if self.revision is None else None


def find(where: str, field: str, what: str) -> Place:
    """The place that `where` names: a folder on this machine, or ID or ID@REVISION on the hub.

    Args:
        where: As in the config.
        field: Path of the config field, for the error.
        what: What the id names, such as "a model", for the error.

    Raises:
        UserError: The text looks like a folder that does not exist.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return Place(str(path), None)
    if where.startswith((".", "/", "~")) or path.exists():
        raise UserError(
            f"{field}: there is no folder {where!r} (relative to {Path.cwd()}); write a local folder, or the id of "
            f"{what} on the hub"
        )
    name, _, revision = where.partition("@")
    return Place(name, revision or "main")


def commit_of(place: Place, kind: RepositoryKind, field: str) -> str:
    """The commit of a repository's revision: as the hub says or, if it cannot be reached, as it last said here.

    Raises:
        UserError: There is no such repository or revision, or nothing is known about it.
    """
    assert place.revision is not None
    if COMMIT.fullmatch(place.revision):
        return place.revision
    # Slow to import, and most recipes do without.
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE, REPO_ID_SEPARATOR
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    cached = REPO_ID_SEPARATOR.join([f"{kind}s", *place.name.split("/")])
    seen = Path(HF_HOME, "largebatch", "commits", quote(f"{cached}@{place.revision}", safe=""))
    try:
        commit = HfApi().repo_info(place.name, repo_type=kind, revision=place.revision, timeout=SECONDS).sha
        assert commit is not None
    # It raises exceptions of many kinds for a hub that cannot be reached.
    except Exception as error:
        # Other programs leave what they saw in the hub's own cache.
        files = [file for file in (seen, Path(HF_HUB_CACHE, cached, "refs", place.revision)) if file.is_file()]
        if files and not isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
            known = {file.read_text(encoding="utf-8").strip(): file.stat().st_mtime for file in files}
            # What is on this machine, or else what was seen last.
            return max(known, key=lambda each: (Path(HF_HUB_CACHE, cached, "snapshots", each).is_dir(), known[each]))
        raise UserError(
            f"{field}: the commit of {place.name}@{place.revision} could not be found: {reason_of(error)}; write a "
            "local folder, or an id on the hub; if that cannot be reached here, run `largebatch prepare` where it can "
            f"be, with this HF_HOME: {HF_HOME}"
        ) from error
    with suppress(OSError):
        seen.parent.mkdir(parents=True, exist_ok=True)
        unfinished = seen.with_name(f".{seen.name}.{os.getpid()}")
        unfinished.write_text(commit, encoding="utf-8")
        unfinished.replace(seen)
    return commit
