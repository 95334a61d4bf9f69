"""What the container of a job would not see: slurm/steps.sh mounts some folders into it, and the user names others."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from largebatch.config import as_json
from largebatch.config.data import HubOrLocal, TokenizedText
from largebatch.tools.slurm.batch_script import BatchScript


def unseen_in_container(script: BatchScript) -> Iterator[str]:
    """Yield which files and folders that a valid recipe names are not mounted in the job's container, if it has one."""
    assert script.config is not None
    settings = script.environment
    image, home = settings.get("LARGEBATCH_CONTAINER", ""), settings.get("HF_HOME")
    if not image or image.startswith("command:"):
        return
    pairs = [pair.split(":") for pair in settings.get("LARGEBATCH_CONTAINER_MOUNTS", "").split(",") if pair]
    mounts = {Path.cwd(): Path.cwd()} | {Path(pair[:2][-1]): Path(pair[0]) for pair in pairs}
    if home:
        mounts[Path(home).absolute()] = Path(home)
    if image.startswith("apptainer:"):
        # It mounts the user's home by itself.
        mounts[Path.home()] = Path.home()
    elif not home and isinstance(script.config.data, HubOrLocal | TokenizedText):
        yield (
            "HF_HOME is not set: what is downloaded and prepared would be in a home folder that the container does "
            "not have; export HF_HOME=DIR, a folder that all nodes share"
        )
    for name, value in _texts(as_json(script.config)):
        path = Path(os.path.normpath(Path(value).absolute()))
        while re.search(r"[*?\[]", str(path)):
            path = path.parent
        if path.exists() and not _is_seen(path, mounts):
            folder = path if path.is_dir() else path.parent
            yield (
                f"{name}: {value} is not mounted in the container; set LARGEBATCH_CONTAINER_MOUNTS={folder}:{folder}, "
                "or a folder above it, separated by a comma from other mounts"
            )


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The texts in a recipe, with their dotted names."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{name}.{key}".lstrip("."))


def _is_seen(path: Path, mounts: Mapping[Path, Path]) -> bool:
    """Whether a path is in a mounted folder, and so is what it leads to if there are links in it."""
    real = path.resolve()
    mounted = {*mounts, *(source.resolve() for source in mounts.values())}
    return any(map(path.is_relative_to, mounts)) and any(map(real.is_relative_to, mounted))
