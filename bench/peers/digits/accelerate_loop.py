"""The loop of raw.py through `Accelerator.prepare`, as Accelerate's quick tour has it."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from peers.digits.job import BATCH, EPOCHS, STEPS, digits, perceptron


def train(clock):
    accelerator = Accelerator(cpu=True)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    loader = DataLoader(TensorDataset(*digits()), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(EPOCHS):
        for pixels, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(pixels), labels))
            optimizer.step()
            schedule.step()
            clock.step()
