"""Inputs with their channels last: the same function, in the layout that convolutions keep."""

import pytest
import torch
from torch import nn

from largebatch.errors import UserError
from largebatch.model.channels_last import channels_last_inputs


class Observed(nn.Module):
    """A convolution that notes how its inputs and outputs are laid out."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 16, 3)
        self.are_last = []

    def forward(self, pixel_values, labels=None):
        outputs = self.convolution(pixel_values)
        for tensor in (pixel_values, outputs):
            self.are_last.append(tensor.is_contiguous(memory_format=torch.channels_last))
        return outputs if labels is None else (outputs, labels)


def test_inputs_by_place_and_by_name():
    torch.manual_seed(0)
    model = Observed()
    images = torch.randn(2, 8, 5, 7)
    labels = torch.arange(6).view(2, 3).T
    expected = model(images)
    assert model.are_last == [False, False]
    channels_last_inputs(model)
    torch.testing.assert_close(model(images), expected)
    outputs, same = model(pixel_values=images, labels=labels)
    torch.testing.assert_close(outputs, expected)
    assert model.are_last[2:] == [True] * 4
    assert same is labels


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(
        UserError, match=r"compute\.channels_last: Sequential has no convolutions of images; write false"
    ):
        channels_last_inputs(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 1)))
