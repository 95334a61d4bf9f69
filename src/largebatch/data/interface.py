"""The interface for tasks: what most of their `data.py` and `train.py` need of the modules of this folder."""

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.mixture import open_mixed
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, SampleSource, Sources
from largebatch.data.text import IGNORE_INDEX, count_targets, tokenized_samples
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Indices",
    "Preparation",
    "SampleSource",
    "Sources",
    "Use",
    "check_vocabulary",
    "count_targets",
    "derive_seed",
    "load_tokenizer",
    "open_mixed",
    "open_splits",
    "tokenized_samples",
]
