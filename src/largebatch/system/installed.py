"""The installed versions that a run's numbers depend on."""

import importlib.metadata
import platform
from contextlib import suppress

from largebatch import __version__

PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "pillow",
    "scikit-learn",
    "xxhash",
)


def installed_versions() -> dict[str, str]:
    """The versions of Python, largebatch and `PACKAGES`, by name; missing packages are omitted."""
    versions = {"python": platform.python_version(), "largebatch": __version__}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
