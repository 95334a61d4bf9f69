"""Accelerate's `accumulate`, as its documentation has it."""

import torch
from accelerate import Accelerator
from common import IGNORED, audited, network, samples
from torch import nn
from torch.utils.data import DataLoader


def train(indices, micro_batch_size, accumulation, prepares_schedule=False, ignored=-100):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(samples(indices), micro_batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if prepares_schedule:
        schedule = accelerator.prepare(schedule)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets, ignore_index=ignored))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if prepares_schedule or accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
    return model


audit = audited(train)
prepared_schedule = audited(train, prepares_schedule=True)
unequal_targets = audited(train, ignored=IGNORED)
