"""What parameters are in their model: their kinds, and which of them have no weight decay."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from largebatch.config.optimizers import ParameterRole
from largebatch.config.optimizers.sections import ParameterKind
from largebatch.model.parts import embedding_layer, has_inputs_first
from largebatch.optim.names import names_matching
from largebatch.plan import RunPlan

# Ends of names, and modules of output layers, as torchvision, timm and transformers name them.
POSITIONS_AND_TOKENS = ("_token", "_embed", "_embedding", "_embeddings")
OUTPUT_NAMES = {"classifier", "fc", "head", "heads", "score"}


def roles_of(trainable: Mapping[str, nn.Parameter], model: nn.Module, plan: RunPlan) -> dict[str, ParameterRole]:
    """The role of each trainable parameter, by name.

    It has no weight decay if the recipe says so, by its kind or by its name, or if the model declares it.

    Raises:
        ConfigError: A pattern of the recipe matches no name.
    """
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    output = _output_layer(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Several modules may share it.
            places.setdefault(parameter, (module, name))
    exempt = _declared_without_decay(model)
    named: dict[str, dict[str, Any]] = {name: {} for name in trainable}
    for field, patterns in plan.name_patterns.items():
        for pattern, value in patterns.items():
            for name in names_matching(pattern, trainable, f"optimizer.{field}"):
                named[name].setdefault(field, value)
    roles = {}
    for name, parameter in trainable.items():
        module, own_name = places[parameter]
        kind = _kind_of(module, own_name, output)
        decays = name not in exempt and kind not in plan.optimizer.no_decay and "no_decay_names" not in named[name]
        about = (has_inputs_first(module), isinstance(module, _ConvNd), named[name])
        roles[name] = ParameterRole(kind, tuple(parameter.shape), decays, *about)
    return roles


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The layer of `transformers`' output embeddings or, in other models, the last one inside a usual name's module."""
    output = embedding_layer(model, "get_output_embeddings")
    if output is None:
        for path, module in model.named_modules():
            if OUTPUT_NAMES & set(path.split(".")) and [*module.parameters(recurse=False)]:
                output = module
    return output


def _kind_of(module: nn.Module, name: str, output: nn.Module | None) -> ParameterKind | None:
    """The kind of the parameter `name` that `module` itself holds; `output` is the model's output layer.

    A norm's own bias is of the kind "norm". Normalization layers outside torch are recognized by their class names.
    """
    if "Norm" in type(module).__name__:
        return "norm"
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    # A vision transformer's class token and positions are not modules of their own.
    if isinstance(module, nn.Embedding) or name.endswith(POSITIONS_AND_TOKENS):
        return "embedding"
    return "output" if module is output else None


def _declared_without_decay(model: nn.Module) -> set[str]:
    """The names that the model declares: by `_no_weight_decay` of a parameter, as mamba_ssm sets it, or by a module's
    method `no_weight_decay`, which in timm returns names inside the module, also of parameters that it does not have.
    """
    declared = {name for name, parameter in model.named_parameters() if getattr(parameter, "_no_weight_decay", False)}
    for prefix, module in model.named_modules():
        for name in getattr(module, "no_weight_decay", set)():
            declared.add(f"{prefix}.{name}" if prefix else name)
    return declared
