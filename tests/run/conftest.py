"""What tests of runs share."""

import pytest


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run, which the run makes."""
    return tmp_path / "run"
