"""Any causal language model of `transformers`, pretrained or with random weights, and an example batch."""

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from largebatch.errors import UserError, reason_of
from largebatch.model.parts import has_inputs_first, store_frozen_in_bf16
from largebatch.model.pretrained import load_whole
from largebatch.model.token_losses import example_tokens, return_token_losses
from largebatch.system.repositories import find
from largebatch.words import some

from .config import AutoCausalLM, Config, Lora
from .trial import trial

# Parts of the names of settings that make a model random in training: "attention_dropout", "resid_pdrop", "layerdrop",
# "router_jitter_noise". Every architecture has its own names.
RANDOM_SETTINGS = ("drop", "jitter")
# Settings of a loss of mixtures of experts, which training does not add.
ROUTER_SETTINGS = ("output_router_logits", "router_aux_loss_coef")
# Names that peft takes for those of experts in many models that have any, whichever layer they name.
EXPERT_LAYERS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
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
    # As in Qwen2, unless `use_sliding_window` is true and `max_window_layers` is below the number of layers.
    has_no_window = not settings.get("sliding_window") or {*(settings.get("layer_types") or ())} == {"full_attention"}
    idle = []
    for name, value in given.items():
        # It would silently keep a setting that is not the architecture's own, and one of two names of the same.
        is_own = name == "model_type" or (hasattr(type(config)(), name) and not hasattr(PretrainedConfig(), name))
        is_twice = config.attribute_map.get(name) in given
        is_of_a_window = "sliding_window" in name or name == "max_window_layers"
        is_off = value and (_is_random(name) or (is_of_a_window and has_no_window))
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
    # There are no images or sounds to train the rest on.
    trained = _text_parameters(loaded)
    for parameter in loaded.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)
    if model.lora is not None:
        _add_adapters(loaded, model.lora)
    if model.stores_frozen_in_bf16:
        store_frozen_in_bf16(loaded)
    return loaded


def _text_parameters(model: PreTrainedModel) -> set[nn.Parameter]:
    """The parameters that text reaches: all, or those of the text model and the output layer in a model of more."""
    if model.config.get_text_config() is model.config:
        return {*model.parameters()}
    ends = [model.get_decoder(), model.get_output_embeddings()]
    return {parameter for module in ends for parameter in module.parameters()}


def _add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the weights and add adapters to the named layers, which change nothing until they are trained."""
    if importlib.util.find_spec("peft") is None:
        raise UserError('model.lora: peft is not installed; pip install "largebatch[lora]", or write null')
    from peft import LoraConfig

    layers, weights = _targets(model, lora)
    if weights and lora.dropout:
        raise UserError(
            f"model.lora.dropout: peft has no dropout for {some(weights)}; write 0, or name other layers in "
            "target_modules"
        )
    adapters = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=layers,
        target_parameters=weights,
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(adapters)
    except ValueError as error:
        raise UserError(
            f"model.lora: {error}; install that peft or, in target_modules, write names of linear layers, or all-linear"
        ) from error
    # It may take other names, too, for those of experts.
    if missing := [name for name in layers if not hasattr(model.get_submodule(name), "base_layer")]:
        raise UserError(
            f"model.lora.target_modules: peft gives no adapter to {some(missing)} of {type(model).__name__}; "
            "write names of other layers only"
        )


def _targets(model: PreTrainedModel, lora: Lora) -> tuple[list[str], list[str]]:
    """The names of the layers that get an adapter, and of weights that do in other layers: of experts and routers."""
    trained = _text_parameters(model)
    output = model.get_output_embeddings()
    layers: list[str] = []
    linear: list[str] = []
    weights: list[str] = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or not trained.issuperset(own.values()):
            continue
        is_linear = type(module) is nn.Linear or has_inputs_first(module) or module is output
        matrices = [each for each, parameter in own.items() if not is_linear and _is_matrix(module, each, parameter)]
        weights += [f"{name}.{each}" for each in matrices]
        layers += [name] * (not matrices)
        linear += [name] * (is_linear and module is not output)
    if weights:
        taken = {name for name in linear if name.rpartition(".")[2] in EXPERT_LAYERS}
        weights += [f"{name}.weight" for name in linear if name in taken]
        layers, linear = ([name for name in names if name not in taken] for names in (layers, linear))
    if isinstance(lora.target_modules, str):
        return linear, weights
    chosen: set[str] = set()
    for target in lora.target_modules:
        # "up_proj" is a part of a stacked "gate_up_proj", and "gate" the layer of "gate.weight".
        named = {name for name in weights if name.endswith((target, f".{target}.{name.rpartition('.')[2]}"))}
        named |= {name for name in layers if f".{name}".endswith(f".{target}")}
        if not named:
            known = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in [*linear, *weights]})
            raise UserError(
                f"model.lora.target_modules: no layer is named {target}; write names of the model's linear layers "
                f"({', '.join(known)}), or all-linear"
            )
        chosen |= named
    return [name for name in layers if name in chosen], [name for name in weights if name in chosen]


def _is_matrix(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter that is not a linear layer's multiplies vectors: of stacked experts, or of a router."""
    if isinstance(module, nn.Embedding | _ConvNd) or "Norm" in type(module).__name__:
        return False
    # Other parameters of several dimensions are biases and states.
    return min(parameter.shape) > 1 and (parameter.dim() == 3 or (parameter.dim() == 2 and name == "weight"))


def _unusable(model: AutoCausalLM, error: Exception) -> UserError:
    if model.path is None:
        return UserError(f"model.config: transformers cannot build it: {reason_of(error)}; correct it")
    return UserError(
        f"model.path: {model.path!r} could not be loaded: {reason_of(error)}; write the local folder or the hub id of "
        "a causal language model"
    )
