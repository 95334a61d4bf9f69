"""Which parameters get weight decay, decided from the model alone, so that it is the same on every strategy."""

from collections.abc import Collection
from typing import Any

from torch import nn

from largebatch.config.optimizers import ParameterKind


def parameter_groups(
    model: nn.Module, weight_decay: float, no_decay: Collection[str] = ("norm", "bias"), layerwise: bool = False
) -> list[dict[str, Any]]:
    """The trainable parameters in at most two groups: with weight decay, and without.

    Args:
        model: The model, before `prepare`.
        weight_decay: Weight decay of the first group.
        no_decay: Kinds of parameters that go to the second. Goyal et al. 2017, section 5.1 leave out BatchNorm's
            scale and shift only: ("norm",).
        layerwise: Whether the groups are for LARS or LAMB, which adapt the first one alone.

    Returns:
        Parameter groups for a torch optimizer; a parameter that several modules share is in them once.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            (exempt if kind_of(module, name) in no_decay else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    if layerwise:
        groups = [group | {"layerwise": group["params"] is decayed} for group in groups]
    return [group for group in groups if group["params"]]


def kind_of(module: nn.Module, name: str) -> ParameterKind | None:
    """The kind of the parameter `name` that `module` itself holds; None is an ordinary weight.

    A norm's own bias is of the kind "norm". Normalization layers outside torch are known by their class's name.
    """
    if "Norm" in type(module).__name__:
        return "norm"
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    # A vision transformer's class token and positions are no modules of their own.
    is_embedding = isinstance(module, nn.Embedding) or name.endswith(("_token", "_embeddings"))
    return "embedding" if is_embedding else None
