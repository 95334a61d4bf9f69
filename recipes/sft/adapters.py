"""Low-rank adapters (LoRA) of `peft`: which layers of a model get one, and whether the model uses it."""

import importlib.util
import re
from functools import partial

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from largebatch.errors import UserError
from largebatch.model.parts import has_inputs_first
from largebatch.words import some

from .config import Lora
from .trial import trial

# Names that peft takes for those of experts in many models that have any, whichever layer they name.
EXPERT_LAYERS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the weights and add adapters to the named layers, which change nothing until they are trained.

    Raises:
        UserError: `peft` is missing, or a layer is not there or cannot have an adapter.
    """
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
        raise UserError(f"model.lora: {error}; install that peft or, in target_modules, name other layers") from error
    # It may take other names, too, for those of experts.
    if missing := [name for name in layers if not hasattr(model.get_submodule(name), "base_layer")]:
        raise UserError(
            f"model.lora.target_modules: peft gives no adapter to {some(missing)} of {type(model).__name__}; "
            "write names of other layers only"
        )


def _targets(model: PreTrainedModel, lora: Lora) -> tuple[list[str], list[str]]:
    """The names of the layers that get an adapter, and of weights that do in other layers: of experts and routers."""
    trained = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False)]
        if own and all(parameter.requires_grad for parameter in own):
            trained[name] = module
    weights = {f"{name}.{each}" for name, module in trained.items() for each in _matrices(module)}
    if weights:
        weights |= {f"{name}.weight" for name in trained if name.rpartition(".")[2] in EXPERT_LAYERS}
    layers = trained.keys() - {name.rpartition(".")[0] for name in weights}
    output = model.get_output_embeddings()
    chosen = {name for name in layers if _is_linear(trained[name]) and trained[name] is not output} | weights
    if not isinstance(lora.target_modules, str):
        known = sorted({each.rpartition(".")[2] for name in chosen for each in _names(name)})
        chosen = set()
        for target in lora.target_modules:
            named = {name for name in layers | weights if any(each.endswith(f".{target}") for each in _names(name))}
            if not named:
                raise UserError(
                    f"model.lora.target_modules: no layer is named {target}; write names of the model's linear layers "
                    f"({', '.join(known)}), or all-linear"
                )
            chosen |= named
    return sorted(layers & chosen), sorted(weights & chosen)


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or has_inputs_first(module)


def _matrices(module: nn.Module) -> list[str]:
    """The weights by which a layer that is not linear multiplies vectors: of stacked experts, or of a router."""
    if _is_linear(module) or isinstance(module, nn.Embedding | _ConvNd) or "Norm" in type(module).__name__:
        return []
    # Other parameters of several dimensions are biases and states.
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if (parameter.dim() == 3 or (parameter.dim() == 2 and name == "weight")) and min(parameter.shape) > 1
    ]


def _names(name: str) -> list[str]:
    """By what names the config may choose a layer, or a weight; the layers of experts may be one stacked weight."""
    layer = f".{name}".removesuffix(".weight")
    return [layer, *(layer.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj"))]


def check_adapters(model: PreTrainedModel) -> None:
    """Run the model, and see which layers it calls.

    Raises:
        UserError: It does not call a layer with an adapter, but uses its weight, so the adapter would not be trained.
    """
    called: set[nn.Module] = set()
    with trial(model) as tested, register_module_forward_hook(lambda module, *_: called.add(module)):
        tested(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    # A small twin has no adapters, and fewer layers.
    without_numbers = partial(re.sub, r"\d+", "")
    uncalled = {without_numbers(name) for name, layer in tested.named_modules() if layer not in called}
    adapted = [name for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
    if unused := [name for name in adapted if without_numbers(name) in uncalled]:
        raise UserError(
            f"model.lora.target_modules: {type(model).__name__} uses the weight of {some(unused)} without calling the "
            "layer, so an adapter would not be trained; write names of other layers"
        )
