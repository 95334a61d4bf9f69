"""Settings that must stand before anything is imported, and a copy of the project to plant mistakes in."""

import os
import shutil

import pytest

from paths import ROOT

# Several processes share the cores of one machine; one thread each also makes sums come out in one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No test may wait for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"


# First, because xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What two workers may share, and in which order: the tests of a file stay together, and the longest come first.

    Those of the one cluster are a group too, which waits more than it works. Next are the files beside this one, most
    of which train whole recipes.
    """
    for item in items:
        group = "cluster" if "cluster" in item.path.parts else str(item.path.relative_to(ROOT))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: ("cluster" not in item.path.parts, item.path.parent != ROOT / "tests"))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder is a copy of the repository's recipes, scripts and configs."""
    for folder in ("recipes", "slurm", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path
