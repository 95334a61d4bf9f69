"""Loops on Accelerate: under `accumulate` as its documentation has it, and what goes wrong around it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def samples():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(100, 6, generator=generator), torch.randint(3, (100,), generator=generator))


def network():
    set_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(indices, micro_batch_size, accumulation, prepares_schedule):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Subset(samples(), indices), micro_batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if prepares_schedule:
        schedule = accelerator.prepare(schedule)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if prepares_schedule or accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
    return model


def audit(indices, micro_batch_size, accumulation):
    return train(indices, micro_batch_size, accumulation, prepares_schedule=False)


def prepared_schedule(indices, micro_batch_size, accumulation):
    return train(indices, micro_batch_size, accumulation, prepares_schedule=True)
