"""A bare script under `accelerate launch`: the imports of a recipe, its model, one optimizer step of its batch on DDP.

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml bench/peers/start/bare.py FILE

Writes the loss of the first step to FILE.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import xxhash  # noqa: F401 - as the recipe does
from accelerate import Accelerator
from pydantic import BaseModel, Field  # noqa: F401
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel

BLOCK = 128
MICRO_BATCH = 8
ACCUMULATION = 2

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=128, n_layer=4, n_head=4, use_cache=False)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
tokens = np.frombuffer("\n".join(topics.values()).encode(), dtype=np.uint8).astype(np.int64)
for micro_step in range(ACCUMULATION):
    first = (micro_step * accelerator.num_processes + accelerator.process_index) * MICRO_BATCH * BLOCK
    rows = torch.from_numpy(tokens[first : first + MICRO_BATCH * BLOCK + 1]).to(accelerator.device)
    with accelerator.no_sync(model) if micro_step < ACCUMULATION - 1 else torch.enable_grad():
        logits = model(input_ids=rows[:-1].view(MICRO_BATCH, BLOCK)).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[1:])
        accelerator.backward(loss / ACCUMULATION)
optimizer.step()
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(str(loss.item()))
accelerator.end_training()
