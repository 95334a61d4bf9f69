"""A perceptron of 64 x 64 on scikit-learn's digits, AdamW: a step of the model takes so little that the loop shows."""

import torch
from sklearn.datasets import load_digits
from torch import nn

SAMPLES = 1437
BATCH = 64
EPOCHS = 90
STEPS = SAMPLES // BATCH * EPOCHS


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in [0, 1], float32 (samples, 64), and labels."""
    bunch = load_digits()
    return torch.from_numpy(bunch.data[:SAMPLES]).float() / 16, torch.from_numpy(bunch.target[:SAMPLES])


def perceptron() -> nn.Module:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
