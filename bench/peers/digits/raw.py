"""What PyTorch's tutorials show: `DataLoader` over a `TensorDataset`, AdamW, a `LambdaLR`."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from peers.digits.job import BATCH, EPOCHS, STEPS, digits, perceptron


def train(clock):
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    loader = DataLoader(TensorDataset(*digits()), batch_size=BATCH, shuffle=True, drop_last=True)
    for _ in range(EPOCHS):
        for pixels, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(pixels), labels).backward()
            optimizer.step()
            schedule.step()
            clock.step()
