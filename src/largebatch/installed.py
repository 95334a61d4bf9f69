"""What is installed: the versions that a run's numbers depend on."""

import importlib.metadata
import platform

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
    """Versions of Python, of largebatch and of `PACKAGES`, by name; those that are missing are left out."""
    versions = {"python": platform.python_version(), "largebatch": __version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
