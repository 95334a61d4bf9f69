"""The towers of this folder, whose `forward` returns the vectors of a micro-batch and the scalars of the loss."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from largebatch.model.attention import freeze_key_biases

from .config import Config, Images, ImageText, ResNetTowers, SharedText
from .resnet import ResNetCLIP

Encoded = dict[str, torch.Tensor]


def build_model(config: Config) -> CLIPModel | SiglipModel | BertModel:
    """The towers with random weights; called with texts or images, or both, they return features."""
    if isinstance(config.model, SharedText):
        return _shared_text(config.model, 1 / config.loss.temperature)
    section = config.model
    data = config.data
    loss = config.loss
    assert isinstance(data, Images)
    text = section.text.settings | {
        "vocab_size": section.vocab_size,
        "max_position_embeddings": data.max_tokens,
        "bos_token_id": None,
        "eos_token_id": section.end_of_text,
        "pad_token_id": None,
    }
    image: dict[str, Any] = {
        "image_size": data.image_size,
        "patch_size": section.patch_size,
        "num_channels": data.num_channels,
    }
    if isinstance(section, ResNetTowers):
        # The ResNet takes the place of a transformer without layers.
        image |= {"hidden_size": 32 * section.image.width, "num_hidden_layers": 0, "num_attention_heads": 1}
        image |= section.image.model_dump()
    else:
        image |= section.image.settings
    model: CLIPModel | SiglipModel
    if section.architecture == "siglip":
        model = SiglipModel(SiglipConfig(text_config=text | {"projection_size": section.features}, vision_config=image))
        model.logit_bias._no_weight_decay = True
        nn.init.constant_(model.logit_bias, loss.bias)
    else:
        kind = ResNetCLIP if section.architecture == "clip_resnet" else CLIPModel
        model = kind(CLIPConfig(text_config=text, vision_config=image, projection_dim=section.features))
        # Of shape (1,), as sharded strategies need it; exported as a scalar, as `from_pretrained` does.
        model.logit_scale = nn.Parameter(torch.empty(1))
        model.config.scalar_parameters = ["logit_scale"]
    model.logit_scale._no_weight_decay = True
    model.logit_scale.requires_grad_(loss.learned)
    nn.init.constant_(model.logit_scale, -math.log(loss.temperature))
    freeze_key_biases(model)
    max_logit_scale = -math.log(loss.min_temperature)

    def forward(pixel_values: torch.Tensor | None = None, input_ids: torch.Tensor | None = None, **_: Any) -> Encoded:
        features = []
        if pixel_values is not None:
            features.append(model.get_image_features(pixel_values=pixel_values).pooler_output)
        if input_ids is not None:
            # What follows the end of a text is not masked: "clip" does not look at it, "siglip" is trained with it.
            features.append(model.get_text_features(input_ids=input_ids.flatten(0, -2)).pooler_output)
        scale = Capped.apply(model.logit_scale, max_logit_scale).exp().squeeze()  # type: ignore[no-untyped-call]
        encoded = {"features": normalize(torch.stack(features, dim=1).to(scale.dtype), dim=-1), "scale": scale}
        if section.architecture == "siglip":
            encoded["bias"] = model.logit_bias.squeeze()
        return encoded

    model.forward = forward
    return model


def _shared_text(section: SharedText, scale: float) -> BertModel:
    model = BertModel(
        BertConfig(
            **section.settings,
            vocab_size=section.vocab_size,
            max_position_embeddings=section.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=None,
        ),
        add_pooling_layer=False,
    )
    freeze_key_biases(model)
    read = model.forward

    def forward(input_ids: torch.Tensor, mask: torch.Tensor) -> Encoded:
        flat = mask.flatten(0, -2)
        states = read(input_ids=input_ids.flatten(0, -2), attention_mask=flat).last_hidden_state
        # The sum and the mean of vectors have the same direction.
        vectors = (states.to(torch.get_default_dtype()) * flat.unsqueeze(-1)).sum(dim=1)
        features = normalize(vectors, dim=-1).view(*mask.shape[:-1], -1)
        return {"features": features, "scale": features.new_full((), scale)}

    model.forward = forward
    return model


class Capped(torch.autograd.Function):
    """The smaller of a parameter and a limit; beyond the limit, only a gradient that leads back passes."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(parameter > limit)
        return parameter.clamp(max=limit)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (is_beyond,) = ctx.saved_tensors
        return torch.where(is_beyond, gradient.clamp(min=0), gradient), None


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """A micro-batch of the arguments with which training calls the model."""
    count = config.batch.micro_batch_size
    num_texts = config.vectors_per_sample - isinstance(config.model, ImageText)
    tokens = torch.zeros(count, num_texts, config.data.max_tokens, dtype=torch.int64)
    batch = {"input_ids": tokens, "mask": tokens == 0}
    if isinstance(config.data, Images):
        side = config.data.image_size
        batch["pixel_values"] = torch.zeros(count, config.data.num_channels, side, side)
    return batch
