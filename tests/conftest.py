"""Settings that must stand before anything is imported."""

import os

# Several processes share the cores of one machine; one thread each also makes sums come out in one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No test may wait for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
