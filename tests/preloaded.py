"""Imported once by the server that test jobs are forked from; runs no torch operation."""

import accelerate.commands.launch
import datasets
import deepspeed
import deepspeed.runtime.zero.utils
import sklearn.datasets
import tensorboard
import torch
import torch._inductor.compile_fx
import torch.utils.tensorboard
import transformers
import transformers.conversion_mapping
from deepspeed.runtime.zero.muon import muon_optimizer
from transformers import GPT2LMHeadModel, ResNetForImageClassification

import largebatch.backend.zero
import largebatch.data.images
import largebatch.data.text
import largebatch.run

__all__ = [
    "GPT2LMHeadModel",
    "ResNetForImageClassification",
    "accelerate",
    "datasets",
    "deepspeed",
    "largebatch",
    "muon_optimizer",
    "sklearn",
    "tensorboard",
    "torch",
    "transformers",
]
