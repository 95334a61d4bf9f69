"""Settings that must stand before anything is imported, and a copy of the project to plant mistakes in."""

import os
import shutil
from collections import Counter
from itertools import chain, zip_longest

import pytest

# Several processes share the cores of one machine; one thread each also makes sums come out in one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The numbers of processes and the tolerances are those of CPUs; `make gpu` is for GPUs.
if os.environ.get("LARGEBATCH_TEST_ON_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# No test may wait for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import jobs
from paths import ROOT

# What somebody's shell, a git hook or `make` has set is not for the repositories, servers and commands of tests.
for _name in list(os.environ):
    if _name.startswith("GIT_") or _name in ("MAKEFLAGS", "STRATEGY", "CONFIG"):
        del os.environ[_name]
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = f"{os.environ.get(_name, '')},127.0.0.1".lstrip(",")
os.umask(0o022)


def pytest_collection_modifyitems(items):
    """Order files for workers that take one at a time: those with most slow tests first, and the cluster's among them.

    The cluster's tests mostly wait, so each of them is beside one that computes.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    files = sorted({item.path for item in items}, key=lambda file: (-slow[file], file))
    waiting = [file for file in files if "cluster" in file.parts]
    computing = [file for file in files if "cluster" not in file.parts]
    order = {file: place for place, file in enumerate(chain.from_iterable(zip_longest(waiting, computing)))}
    items.sort(key=lambda item: order[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A job is slow: a test that is not marked so may not start one, or `make check` would no longer be quick."""
    jobs.allowed = item.get_closest_marker("slow") is not None
    if item.get_closest_marker("root") and os.geteuid():
        pytest.skip("it needs root")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """Put `os.environ` back, which the `map` of `datasets` replaces by a copy that `monkeypatch` does not know."""
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run, which the run makes."""
    return tmp_path / "run"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub on this machine, which this process's libraries use."""
    # It imports `datasets`.
    from hub import Hub, use

    hub = Hub()
    with hub.served() as hub.url:
        use(monkeypatch, hub.url, tmp_path / "home")
        yield hub


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder is a copy of the repository's recipes, scripts and configs; its parent is the test's own."""
    copy = tmp_path / "repository"
    for folder in ("recipes", "slurm", "ds_configs"):
        shutil.copytree(ROOT / folder, copy / folder)
    monkeypatch.chdir(copy)
    return copy
