"""Data sets, models and tokenizers: in a local folder, or on the hub."""

from pathlib import Path

from largebatch.errors import UserError


def local_folder(where: str, field: str, what: str) -> Path | None:
    """The folder on this machine that `where` names, or None for an id on the hub.

    Args:
        where: The folder or id, as in the config.
        field: Path of the config field, for the error.
        what: What the id names, such as "a model", for the error.

    Raises:
        UserError: The text looks like a folder that does not exist.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        return path
    if where.startswith((".", "/", "~")) or path.exists():
        raise UserError(
            f"{field}: there is no folder {where!r} (relative to {Path.cwd()}); write a local folder, or the id of "
            f"{what} on the hub"
        )
    return None
