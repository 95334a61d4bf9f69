"""Data sets, models and tokenizers: in a local folder, or in a repository on the hub, at one of its revisions."""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


def find(where: str, field: str) -> Place:
    """The place that `where` names: a folder on this machine, or ID or ID@REVISION on the hub.

    Args:
        where: As in the config.
        field: Path of the config field, for the error.

    Raises:
        UserError: The text looks like a folder that does not exist.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return Place(str(path), None)
    if where.startswith((".", "/", "~")) or path.exists():
        raise UserError(
            f"{field}: there is no folder {where!r} (relative to {Path.cwd()}); write a local folder, or an id on the "
            "hub"
        )
    name, _, revision = where.partition("@")
    return Place(name, revision or "main")


def commit_of(place: Place, kind: RepositoryKind, field: str) -> str:
    """The commit of a repository's revision: as the hub says or, if it cannot be reached, as it last said here.

    Raises:
        UserError: There is no such repository or revision, or nothing is known about it.
    """
    # Slow to import, and most recipes do without.
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HOME

    class PatientApi(HfApi):
        """Waits for an answer, but not forever."""

        def repo_info(self, *words: Any, **options: Any) -> Any:
            return super().repo_info(*words, timeout=SECONDS, **options)

    try:
        return PatientApi().resolve_revision(place.name, repo_type=kind, revision=place.revision).resolved
    # It raises exceptions of many kinds.
    except Exception as error:
        raise UserError(
            f"{field}: the commit of {place.name}@{place.revision} could not be found: {reason_of(error)}; write a "
            "local folder, or an id on the hub; if that cannot be reached here, run `largebatch prepare` where it can "
            f"be, with this HF_HOME: {HF_HOME}"
        ) from error
