"""The parts of `bench/fuzz.py`: how a case is run and judged, mutations, and a file for each target."""

import os
import sys

from record import ROOT

# Before anything imports torch or datasets.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
# A run folder and a checkpoint as the tests write them, without training.
sys.path.insert(0, str(ROOT / "tests"))
