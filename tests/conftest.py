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


def pytest_collection_modifyitems(items):
    """The longest first, for two workers that take a file at a time.

    That is jobs of the cluster, which wait more than they work, and then the files beside this one, most of which train
    whole recipes.
    """
    items.sort(key=lambda item: ("cluster" not in item.path.parts, item.path.parent != ROOT / "tests"))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder is a copy of the repository's recipes, scripts and configs."""
    for folder in ("recipes", "slurm", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path
