"""Imported once by the server that jobs are forked from: imports what jobs need; runs no torch operation."""

import gc
import importlib
import logging
import threading

import tqdm

# DeepSpeed tells what device it has found while it is imported.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)

for name in (
    "accelerate.commands.launch",
    "datasets",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.utils",
    "sklearn.datasets",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "transformers.conversion_mapping",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.resnet.modeling_resnet",
    "transformers.models.vit.modeling_vit",
    "largebatch.backend.zero",
    "largebatch.data.images",
    "largebatch.data.text",
    "largebatch.run",
):
    importlib.import_module(name)

# Compiles hundreds of regular expressions when a first model is saved.
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("gpt2")

# Its own lock would be shared by processes, and left behind by those that are killed.
tqdm.tqdm.set_lock(threading.RLock())

# Collections in the processes of jobs need not go through all that was imported, nor copy its pages.
gc.collect()
gc.freeze()
