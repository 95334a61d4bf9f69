"""Imports what jobs need, once, in the server that they are forked from; runs no torch operation."""

import gc
import importlib
import logging
import os
import threading
from contextlib import suppress

import tqdm

from largebatch.task_folders import import_from
from largebatch.tools.local_jobs.jobs import PRELOAD

# DeepSpeed logs the device that it finds while it is imported.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)

for name in (
    "accelerate.commands.launch",
    "datasets",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.utils",
    "torch._inductor.compile_fx",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "largebatch.backend.fsdp",
    "largebatch.backend.zero",
    "largebatch.run",
):
    # A job that needs a package that is not installed says so.
    with suppress(ModuleNotFoundError):
        importlib.import_module(name)

# Jobs report what is wrong with a task.
for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
    folder, module = os.path.split(name)
    with suppress(Exception, SystemExit):
        if folder:
            import_from(folder, module)
        else:
            importlib.import_module(name)

# Compiles hundreds of regular expressions when a first model is saved.
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("gpt2")

# Its own lock would be shared by processes, and stay locked when one of them is killed.
tqdm.tqdm.set_lock(threading.RLock())

# Garbage collection in jobs need not go through all that was imported, nor copy its pages.
gc.collect()
gc.freeze()
