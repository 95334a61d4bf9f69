"""Imported once by the server that jobs are forked from: imports what jobs need; runs no torch operation."""

import gc
import importlib
import logging
import os
import threading
from contextlib import suppress

import tqdm

from largebatch.tools.verify.jobs import PRELOAD

# DeepSpeed tells what device it has found while it is imported.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)

for name in (
    "accelerate.commands.launch",
    "datasets",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.utils",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "transformers.conversion_mapping",
    "largebatch.backend.zero",
    "largebatch.data.images",
    "largebatch.data.text",
    "largebatch.run",
):
    importlib.import_module(name)

# What is wrong with a task is told by its jobs.
for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
    with suppress(Exception, SystemExit):
        importlib.import_module(name)

# Compiles hundreds of regular expressions when a first model is saved.
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("gpt2")

# Its own lock would be shared by processes, and left behind by those that are killed.
tqdm.tqdm.set_lock(threading.RLock())

# Collections in the processes of jobs need not go through all that was imported, nor copy its pages.
gc.collect()
gc.freeze()
