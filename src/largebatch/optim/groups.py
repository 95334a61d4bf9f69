"""The parameter groups of a plan's optimizer, decided from the model: weight decay, learning rates and freezing."""

from collections import defaultdict
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from largebatch.config.optimizers import ParameterKind
from largebatch.errors import ConfigError
from largebatch.model.parts import lists_of_blocks
from largebatch.plan import RunPlan
from largebatch.words import did_you_mean


def planned_groups(model: nn.Module, plan: RunPlan) -> list[dict[str, Any]]:
    """The parameter groups that the plan's optimizer must have: the model's trainable parameters, each once.

    Those with weight decay come first. A group may have a `lr_factor`, which the learning rate is multiplied by, and
    `frozen_steps`, the number of first steps in which it is not updated. For LARS and LAMB, `layerwise` says whether
    the steps of its parameters are adapted.

    Args:
        model: The model, before `prepare`.
        plan: The plan. Goyal et al. 2017, section 5.1 exempt only BatchNorm's scale and shift from weight decay: its
            `no_decay` is then ["norm"].

    Raises:
        ConfigError: A pattern of the plan's groups matches nothing, the model has no blocks for layer-wise rates, or
            every parameter is frozen.
    """
    entry, optimizer = plan.optimizer_entry, plan.optimizer
    assert entry is not None
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameter; leave requires_grad of some true")
    kinds: dict[nn.Parameter, ParameterKind | None] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Several modules may share it.
            kinds.setdefault(parameter, _kind_of(module, name))
    rules = _rules(trainable, plan)
    above = {} if optimizer.lr_factor_per_layer is None else _blocks_above(model)
    members: dict[tuple[bool, float, int], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in trainable.items():
        lr_factor, frozen_steps = rules.get(name, (1.0, 0))
        lr_factor *= (optimizer.lr_factor_per_layer or 1.0) ** above.get(parameter, 0)
        members[kinds[parameter] in optimizer.no_decay, lr_factor, frozen_steps].append(parameter)
    groups = []
    for (exempt, lr_factor, frozen_steps), parameters in sorted(members.items(), key=lambda item: item[0][0]):
        group = {"params": parameters, "weight_decay": 0.0 if exempt else optimizer.weight_decay}
        special = {"lr_factor": (lr_factor, 1.0), "frozen_steps": (frozen_steps, 0)}
        group |= {name: value for name, (value, usual) in special.items() if value != usual}
        groups.append(group | ({"layerwise": not exempt} if entry.needs == "norms of layers" else {}))
    return groups


def _rules(trainable: Collection[str], plan: RunPlan) -> dict[str, tuple[float, int]]:
    """The learning rate's factor and the number of frozen steps of each parameter that a group of the plan matches."""
    rules: dict[str, tuple[float, int]] = {}
    for group, frozen_steps in zip(plan.optimizer.groups or (), plan.frozen_steps, strict=True):
        pattern = group.parameters
        matched = [name for name in trainable if name not in rules and fnmatchcase(name, pattern)]
        if not matched:
            modules = [f"{name[:end]}.*" for name in trainable for end, letter in enumerate(name) if letter == "."]
            which = " that an earlier group does not have" if any(fnmatchcase(name, pattern) for name in rules) else ""
            meant = did_you_mean(pattern, [*trainable, *modules])
            examples = dict.fromkeys([*(name for name in modules if name.count(".") == 1), [*trainable][-1]])
            raise ConfigError(
                f'optimizer.groups: "{pattern}" matches no trainable parameter of the model{which}{meant}; write a '
                f"pattern of names, such as {', '.join(examples)}"
            )
        rules |= dict.fromkeys(matched, (group.lr_factor, frozen_steps))
    return rules


def _blocks_above(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of blocks above each parameter; of those before the first block, one more than there are blocks.

    What is before and after the blocks is decided by the order in which the model registers its parameters.
    """
    lists = lists_of_blocks(model)
    if len(lists) != 1:
        raise ConfigError(
            f"optimizer.lr_factor_per_layer: {type(model).__name__} has {len(lists)} lists of blocks, so its layers "
            "have no order; write null, and an lr_factor for each of optimizer.groups"
        )
    number_of = {parameter: number for number, block in enumerate(lists[0], 1) for parameter in block.parameters()}
    top, is_below, above = len(lists[0]) + 1, True, {}
    for parameter in model.parameters():
        is_below = is_below and parameter not in number_of
        above[parameter] = top - number_of.get(parameter, 0 if is_below else top)
    return above


def _kind_of(module: nn.Module, name: str) -> ParameterKind | None:
    """The kind of the parameter `name` that `module` itself holds; None means an ordinary weight.

    A norm's own bias is of the kind "norm". Normalization layers outside torch are recognized by their class names.
    """
    if "Norm" in type(module).__name__:
        return "norm"
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    # A vision transformer's class token and positions are not modules of their own.
    is_embedding = isinstance(module, nn.Embedding) or name.endswith(("_token", "_embeddings"))
    return "embedding" if is_embedding else None
