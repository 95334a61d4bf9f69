"""Low-rank adapters (LoRA) of `peft`: which layers of a model get one."""

import importlib.util

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from largebatch.errors import UserError
from largebatch.model.parts import has_inputs_first
from largebatch.words import some

from .config import Lora

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
