"""The models of this folder, and an example batch."""

from collections.abc import Sequence

import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from largebatch.model.attention import freeze_key_biases

from .config import Config, Vit
from .initialization import initialize
from .small_image_resnet import SmallImageResNet


def build_model(config: Config) -> ResNetForImageClassification | ViTForImageClassification:
    """The model that the config describes, with its initial weights."""
    section = config.model
    data = config.data
    if isinstance(section, Vit):
        # Dosovitskiy et al. 2021, arXiv 2010.11929, with the initial weights of `transformers`.
        vit = ViTForImageClassification(
            ViTConfig(
                image_size=data.image_size,
                patch_size=section.patch_size,
                num_channels=data.num_channels,
                **section.settings,
                layer_norm_eps=1e-6,
                num_labels=data.num_classes,
            )
        )
        freeze_key_biases(vit)
        return vit
    model_class = SmallImageResNet if section.stem == "small_images" else ResNetForImageClassification
    resnet = model_class(ResNetConfig(num_channels=data.num_channels, num_labels=data.num_classes, **section.settings))
    initialize(resnet)
    return resnet


def name_classes(model: ResNetForImageClassification | ViTForImageClassification, names: Sequence[str]) -> None:
    """Have the model's config name the classes for whoever loads it."""
    model.config.id2label = model.config.id2label | dict(enumerate(names[: model.config.num_labels]))
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """A micro-batch of the arguments with which training calls the model."""
    side = config.data.image_size
    return {"pixel_values": torch.zeros(config.batch.micro_batch_size, config.data.num_channels, side, side)}
