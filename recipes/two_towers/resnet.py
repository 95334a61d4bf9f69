"""CLIP whose tower of images is a ResNet (Radford et al. 2021, arXiv 2103.00020, section 2.4)."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention
from transformers import CLIPConfig, CLIPModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

EXPANSION = 4  # channels of a block's output for one of its 3 x 3 convolution
HEAD_CHANNELS = 64


class ResNetCLIP(CLIPModel):  # type: ignore[misc]  # transformers has no types here
    """`transformers`' CLIP with the paper's ResNet in place of the Vision Transformer.

    `config.vision_config` has `width`, the channels of the first stage's 3 x 3 convolutions, and `depths`, the blocks
    of each stage; its `hidden_size` is the channels of the last stage. `ResNetCLIP.from_pretrained` reads saved
    weights; `CLIPModel` would leave out the tower of images.
    """

    def __init__(self, config: CLIPConfig):
        super().__init__(config)
        tower = config.vision_config
        self.vision_model = ResNetTower(tower.width, tower.depths, tower.num_channels, tower.image_size)
        # Unlike that of `transformers`, the paper's has a bias.
        self.visual_projection = nn.Linear(tower.hidden_size, config.projection_dim)
        nn.init.normal_(self.visual_projection.weight, std=tower.hidden_size**-0.5)


class ResNetTower(nn.Module):
    """Images to vectors: a stem of three convolutions, four stages that halve the image but for the first, attention
    as pooling. Wherever the image is halved but in the first convolution, it is averaged (Zhang 2019, arXiv
    1904.11486)."""

    def __init__(self, width: int, depths: list[int], num_channels: int, image_size: int):
        super().__init__()
        half = width // 2
        self.stem = nn.Sequential(
            _convolution(num_channels, half, 3, stride=2),
            nn.ReLU(),
            _convolution(half, half, 3),
            nn.ReLU(),
            _convolution(half, width, 3),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.blocks = nn.ModuleList()
        inputs = width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for number in range(depth):
                stride = 2 if stage and number == 0 else 1
                self.blocks.append(Bottleneck(inputs, channels, stride))
                inputs = EXPANSION * channels
        self.pooling = AttentionPooling(inputs, (image_size // 2 ** (len(depths) + 1)) ** 2)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        images = self.stem(pixel_values)
        for block in self.blocks:
            images = block(images)
        return BaseModelOutputWithPooling(last_hidden_state=images, pooler_output=self.pooling(images))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 beside a shortcut, as which the block starts."""

    def __init__(self, inputs: int, channels: int, stride: int):
        super().__init__()
        outputs = EXPANSION * channels
        last = nn.BatchNorm2d(outputs)
        nn.init.zeros_(last.weight)
        self.residual = nn.Sequential(
            _convolution(inputs, channels, 1),
            nn.ReLU(),
            _convolution(channels, channels, 3),
            nn.ReLU(),
            nn.AvgPool2d(stride),
            nn.Conv2d(channels, outputs, 1, bias=False),
            last,
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.AvgPool2d(stride), _convolution(inputs, outputs, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return relu(self.residual(images) + self.shortcut(images))


class AttentionPooling(nn.Module):
    """Attention over the positions of an image and their mean, whose query gives the vector."""

    def __init__(self, channels: int, num_positions: int):
        super().__init__()
        self.position_embedding = nn.Parameter(torch.empty(1 + num_positions, channels))
        self.q_proj = nn.Linear(channels, channels)
        self.k_proj = nn.Linear(channels, channels)
        self.v_proj = nn.Linear(channels, channels)
        for parameter in (self.position_embedding, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight):
            nn.init.normal_(parameter, std=channels**-0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        vectors = images.flatten(2).transpose(1, 2)
        vectors = torch.cat([vectors.mean(dim=1, keepdim=True), vectors], dim=1) + self.position_embedding
        query, key, value = (
            projected.unflatten(-1, (-1, HEAD_CHANNELS)).transpose(1, 2)
            for projected in (self.q_proj(vectors[:, :1]), self.k_proj(vectors), self.v_proj(vectors))
        )
        return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(1)


def _convolution(inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))
