"""What the container of a job would not see: slurm/steps.sh mounts some folders into it, and the user names others."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from largebatch.config import as_json
from largebatch.config.data import HubOrLocal, TokenizedText
from largebatch.tools.slurm.batch_script import BatchScript


def missing_in_container(script: BatchScript) -> Iterator[str]:
    """Yield what the job's container would lack, if it has one: the image, the environment, a valid recipe's files."""
    assert script.config is not None
    settings = script.environment
    mounts = _mounts(settings)
    if not mounts:
        return
    image = settings["LARGEBATCH_CONTAINER"]
    file = image.removeprefix("apptainer:")
    in_apptainer = file != image
    # Both also take images of registries: Apptainer docker://…, Pyxis every word that does not begin like a path.
    is_path = ":" not in file if in_apptainer else file.startswith(("/", ".")) or file.endswith(".sqsh")
    if is_path and not (os.access(file, os.F_OK) and (in_apptainer or file.startswith("/"))):
        why = "there is no such file on this node, or its path is not absolute"
        yield f"LARGEBATCH_CONTAINER={image}: {why}; write the absolute path of an image that all nodes see"
    if not (in_apptainer or settings.get("HF_HOME")) and isinstance(script.config.data, HubOrLocal | TokenizedText):
        yield "HF_HOME is not set, and the container has no home folder; export HF_HOME=DIR, which all nodes share"
    for name, value, path in _paths({"LARGEBATCH_ENV": settings.get("LARGEBATCH_ENV"), **as_json(script.config)}):
        # A text that is no path may be too long for one.
        if os.access(path, os.F_OK) and not _is_seen(path, mounts):
            folder = path if path.is_dir() else path.parent
            yield (
                f"{name}: {value} is not mounted in the container; set LARGEBATCH_CONTAINER_MOUNTS={folder}:{folder}, "
                "or a folder above it, separated by a comma from other mounts"
            )


def data_only_in_container(script: BatchScript) -> list[str]:
    """The fields of the data that name something in a folder that the container mounts at another path than its own."""
    assert script.config is not None
    mounts = _mounts(script.environment)
    targets = [target for target, source in mounts.items() if target.resolve() != source.resolve()]
    named = _paths({"data": as_json(script.config)["data"]})
    return [f"{name}: {value}" for name, value, path in named if any(map(path.is_relative_to, targets))]


def _mounts(settings: Mapping[str, str]) -> dict[Path, Path]:
    """The mounted folders by their paths in the container; none if there is no container, or it has a command."""
    image = settings.get("LARGEBATCH_CONTAINER", "")
    if not image or image.startswith("command:"):
        return {}
    mounts = [str(Path.cwd()), settings.get("HF_HOME", "")]
    if image.startswith("apptainer:"):
        # It mounts the user's home by itself.
        mounts.append(str(Path.home()))
    mounts += settings.get("LARGEBATCH_CONTAINER_MOUNTS", "").split(",")
    pairs = [mount.split(":") for mount in mounts if mount]
    return {Path(pair[:2][-1]).absolute(): Path(pair[0]) for pair in pairs}


def _paths(value: Any, name: str = "") -> Iterator[tuple[str, str, Path]]:
    """The texts in a recipe, with their dotted names, and the absolute paths that they would be, up to a wildcard or
    a NUL, which no path has."""
    if isinstance(value, str):
        constant = re.sub(r"[^/]*[*?\[\0].*", "", value, flags=re.DOTALL)
        yield name, value, Path(os.path.normpath(Path(constant).absolute()))
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, f"{name}.{key}".lstrip("."))


def _is_seen(path: Path, mounts: Mapping[Path, Path]) -> bool:
    """Whether a path is in a mounted folder, and so is what it leads to if there are links in it."""
    mounted = {*mounts, *(source.resolve() for source in mounts.values())}
    return any(map(path.is_relative_to, mounts)) and any(map(path.resolve().is_relative_to, mounted))
