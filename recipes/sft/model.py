"""Any causal language model of `transformers`, pretrained or with random weights, and an example batch."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from largebatch.errors import UserError, reason_of
from largebatch.model.parts import store_frozen_in_bf16
from largebatch.model.pretrained import load_whole
from largebatch.model.token_losses import example_tokens, return_token_losses
from largebatch.system.repositories import find

from .adapters import add_adapters
from .config import AutoCausalLM, Config
from .trial import trial

# Parts of the names of settings that make a model random in training: "attention_dropout", "resid_pdrop", "layerdrop",
# "router_jitter_noise". Every architecture has its own names.
RANDOM_SETTINGS = ("drop", "jitter")
# Settings of a loss of mixtures of experts, which training does not add.
ROUTER_SETTINGS = ("output_router_logits", "router_aux_loss_coef")
# Kinds of layers that leave `sliding_window` out.
WITHOUT_WINDOW = {"full_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}
# Architectures of which the kinds do not tell it: Moshi has none and reads no window, MiniMax's full attention has one.
HAS_WINDOW = {"moshi": False, "minimax": True}
MAX_LAYERS = 1000
MAX_LABELS = 10**6


def build_model(config: Config) -> PreTrainedModel:
    """The model, with the recipe's adapters if there are any; it returns losses if it is given targets."""
    model = load_causal_lm(config.model)
    with trial(model) as tested:
        # Compute the cross-entropy in the output layer, chunk by chunk: logits would be the largest tensor of all.
        return_token_losses(model, tested)
    return model


def example_batch(config: Config) -> dict[str, torch.Tensor]:
    """A micro-batch of the arguments with which training calls the model."""
    return example_tokens(config, *["position_ids"] * config.data.packing)


def configuration(model: AutoCausalLM) -> PretrainedConfig:
    """The model's own configuration, with all its dropout and other noise turned off.

    Raises:
        UserError: There is no configuration of a whole model at `model.path`, or `model.config` is not one or has a
            setting without effect.
    """
    place = None if model.path is None else find(model.path, "model.path")
    if place and place.folder and (place.folder / "adapter_config.json").exists():
        raise UserError(
            f"model.path: {model.path!r} holds an adapter (adapter_config.json), not a whole model; write the folder "
            "of its base model, or of the adapter merged into that, as recipes/sft/README.md shows"
        )
    given = model.config or {}
    try:
        if place:
            _check_sizes(PretrainedConfig.get_config_dict(place.name, revision=place.revision)[0])
            config = AutoConfig.from_pretrained(place.name, revision=place.revision, trust_remote_code=False)
        else:
            _check_sizes(given)
            config = AutoConfig.for_model(**given)
        text = config.get_text_config()
        settings = text.to_dict()
    # `transformers` raises exceptions of many kinds for configurations that cannot be reached or read.
    except Exception as error:
        raise _unusable(model, error) from error
    kinds = getattr(text, "layer_types", None)
    # Qwen2 has none, unless `use_sliding_window` is true and `max_window_layers` is below the number of layers.
    has_window = getattr(text, "sliding_window", None) and HAS_WINDOW.get(
        text.model_type, not kinds or not WITHOUT_WINDOW.issuperset(kinds)
    )
    idle = []
    for name, value in given.items():
        # It would silently keep a setting that is not the architecture's own, and one of two names of the same.
        is_own = name == "model_type" or (hasattr(type(config)(), name) and not hasattr(PretrainedConfig(), name))
        is_twice = config.attribute_map.get(name) in given
        is_of_a_window = "sliding_window" in name or name in ("max_window_layers", "attention_window_size")
        is_off = value and (_is_random(name) or (is_of_a_window and not has_window))
        if not is_own or is_twice or name in ROUTER_SETTINGS or is_off:
            idle.append(name)
    if idle:
        raise UserError(
            f"model.config: {', '.join(idle)} would have no effect: {config.model_type} has no such setting, it is "
            "given twice, or training does without it, as without dropout, or a window that no layer has; correct or "
            "remove it"
        )
    if place and settings.get("output_router_logits"):
        raise UserError(
            f'model.path: the config.json of {model.path!r} has "output_router_logits": true, the loss of a router, '
            "which training does not add; write false there"
        )
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"model.path: {model.path!r} is quantized (quantization_config in its config.json), and all weights are "
            "trained in fp32; write a folder with the model's whole weights"
        )
    for name, value in settings.items():
        # For PhiMoE's router, it is also the threshold by which experts are chosen without noise.
        is_threshold = (name, text.model_type) == ("router_jitter_noise", "phimoe")
        if _is_random(name) and isinstance(value, float) and not is_threshold:
            setattr(text, name, 0.0)
    text.use_cache = False
    # It would name another file of weights than those that are looked for.
    vars(config).pop("transformers_weights", None)
    return config


def _is_random(setting: str) -> bool:
    return any(part in setting for part in RANDOM_SETTINGS)


def _check_sizes(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of things that `transformers` would make one by one, almost without end."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(value)
        limit = MAX_LABELS if name == "num_labels" else MAX_LAYERS if "layer" in name else math.inf
        if isinstance(value, int) and value > limit:
            raise ValueError(f"{name} is too large; the most is {limit:,}")


def load_causal_lm(model: AutoCausalLM) -> PreTrainedModel:
    """The model that a recipe starts from, with the recipe's adapters if there are any.

    Its weights have torch's default dtype, which `Run` sets, whatever their stored dtype. On torch's "meta" device, and
    where `Run` sets the weights later, only shapes are created, and no weights are read.

    Raises:
        UserError: The model cannot be loaded, weights are missing, an adapter has no layer, or `peft` is missing.
    """
    config = configuration(model)
    is_without_weights = nn.LayerNorm(1).weight.is_meta
    try:
        if model.path is None or is_without_weights:
            dtype = torch.get_default_dtype()
            loaded = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            loaded = load_whole(model.path, config)
    except UserError:
        raise
    except Exception as error:
        raise _unusable(model, error) from error
    embedding = loaded.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.padding_idx is not None:
        # Nothing is padded with it: it is a token like others, whose vector would be 0 and never trained.
        if model.path is None:
            with torch.no_grad():
                vector = embedding.weight[embedding.padding_idx]
                vector.copy_(torch.randn_like(vector) * embedding.weight.std())
        embedding.padding_idx = None
    if loaded.config.get_text_config() is not loaded.config:
        # There are no images or sounds to train the rest on.
        loaded.requires_grad_(False)
        for module in (loaded.get_decoder(), loaded.get_output_embeddings()):
            module.requires_grad_(True)
    if model.lora is not None:
        add_adapters(loaded, model.lora)
    if model.stores_frozen_in_bf16:
        store_frozen_in_bf16(loaded)
    return loaded


def _unusable(model: AutoCausalLM, error: Exception) -> UserError:
    if model.path is None:
        return UserError(f"model.config: transformers cannot build it: {reason_of(error)}; correct it")
    return UserError(
        f"model.path: {model.path!r} could not be loaded: {reason_of(error)}; write the local folder or the hub id of "
        "a causal language model"
    )
