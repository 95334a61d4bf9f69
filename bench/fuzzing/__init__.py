"""The parts of `bench/fuzz.py`: how a case is run and judged, mutations, and a file for each target."""

import os
import sys
import tempfile
from pathlib import Path

from record import ROOT

# Before anything imports torch or datasets.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
# What cases prepare is not kept.
_home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _home.name
SOUND = Path(_home.name, "sound")
"""What cases are made from: a copy of the project, with a finished run that has two checkpoints."""
# A run folder and a checkpoint as the tests write them, without training.
sys.path.insert(0, str(ROOT / "tests"))
