"""A small GPT of `transformers`."""

# The page's blocks use and define such names.
# ruff: noqa: F401

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from .config import Config
from .data import VOCABULARY

# cookbook: model.py
