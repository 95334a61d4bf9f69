"""The networks of this folder with their projection head, and an example batch."""

from itertools import pairwise

import torch
from torch import nn
from transformers import ResNetConfig, ResNetModel

from .config import CHANNELS_PER_GROUP, Config, ConvNet, Projection
from .data import NUM_VIEWS


class Encoder(nn.Module):
    """A network, and the head whose outputs are contrasted; representations are the head's inputs."""

    def __init__(self, backbone: nn.Module, width: int, projection: Projection):
        super().__init__()
        self.backbone = backbone
        activation = {"relu": nn.ReLU, "gelu": nn.GELU}[projection.activation]()
        hidden = projection.hidden_size
        self.head = nn.Sequential(nn.Linear(width, hidden), activation, nn.Linear(hidden, projection.output_size))

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Representations, shape (images, width), and projections, shape (images, output_size)."""
        outputs = self.backbone(pixel_values)
        # A ResNet of `transformers` returns a pooled map of one position.
        representations = getattr(outputs, "pooler_output", outputs).flatten(1)
        return representations, self.head(representations)


def build_model(config: Config) -> Encoder:
    """An encoder with random weights."""
    sizes = config.model.hidden_sizes
    if isinstance(config.model, ConvNet):
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([config.data.num_channels, *sizes]):
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(outputs // CHANNELS_PER_GROUP, outputs), nn.GELU()]
        return Encoder(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), sizes[-1], config.projection)
    backbone = ResNetModel(ResNetConfig(num_channels=config.data.num_channels, **config.model.settings))
    return Encoder(backbone, sizes[-1], config.projection)


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """A micro-batch of the arguments with which training calls the model: all views at once."""
    side = config.data.image_size
    num_images = NUM_VIEWS * config.batch.micro_batch_size
    return {"pixel_values": torch.zeros(num_images, config.data.num_channels, side, side)}
