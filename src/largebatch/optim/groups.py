"""The parameter groups of a plan's optimizer, decided from the model: weight decay and learning rates."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer

from largebatch.config.optimizers import ParameterRole
from largebatch.config.optimizers.sections import ParameterKind
from largebatch.errors import ConfigError
from largebatch.model.parts import embedding_layer, has_inputs_first
from largebatch.plan import RunPlan
from largebatch.words import did_you_mean

# Ends of names, and modules of output layers, as torchvision, timm and transformers name them.
POSITIONS_AND_TOKENS = ("_token", "_embed", "_embedding", "_embeddings")
OUTPUT_NAMES = {"classifier", "fc", "head", "heads", "lm_head", "score"}
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def planned_groups(model: nn.Module, plan: RunPlan) -> list[dict[str, Any]]:
    """The parameter groups that the plan's optimizer must have: the model's trainable parameters, each once.

    Those with weight decay come first. A group may have a `lr_factor`, which the learning rate is multiplied by, and
    the options that the optimizer's entry adds (`group_of`).

    Args:
        model: The model, before `prepare`.
        plan: The plan. Goyal et al. 2017, section 5.1 exempt only BatchNorm's scale and shift from weight decay: its
            `no_decay` is then ["norm"].

    Raises:
        ConfigError: A pattern of the plan matches nothing, or every parameter is frozen.
    """
    optimizer = plan.optimizer
    entry = plan.optimizer_entry
    assert entry is not None
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameter; leave requires_grad of some true")
    roles = _roles_of(trainable, model, plan)
    factors: dict[str, float] = {}
    for section in optimizer.groups or ():
        matched = _names_matching(section.parameters, trainable, "optimizer.groups", taken=factors)
        factors |= dict.fromkeys(matched, section.lr_factor)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, role in roles.items():
        options: dict[str, Any] = {"weight_decay": optimizer.weight_decay if role.decays else 0.0}
        lr_factor = factors.get(name, 1.0)
        if lr_factor != 1.0:
            options["lr_factor"] = lr_factor
        options |= entry.group_of(role)
        group = groups.setdefault((role.decays, *options.items()), {"params": [], **options})
        group["params"].append(trainable[name])
    return [groups[key] for key in sorted(groups, key=lambda key: not key[0])]


def decay_summary(groups: Sequence[Mapping[str, Any]]) -> str:
    """How many of the parameter tensors in groups have no weight decay, in words."""
    exempt = sum(len(group["params"]) for group in groups if group["weight_decay"] == 0)
    return f"none on {exempt:,} of {sum(len(group['params']) for group in groups):,} parameter tensors"


def group_sizes(optimizer: Optimizer) -> list[int]:
    """The number of elements in each parameter group."""
    return [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]


def group_options(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """The hyperparameters of each parameter group, or None, without learning rate and choice of implementation."""
    names = {*optimizer.defaults, "weight_decay", "lr_factor"}
    names -= {"lr", "foreach", "fused", "capturable", "differentiable"}
    return [{name: group.get(name) for name in sorted(names)} for group in optimizer.param_groups]


# --- what parameters are in their model ---------------------------------------------------------------------------


def _roles_of(trainable: Mapping[str, nn.Parameter], model: nn.Module, plan: RunPlan) -> dict[str, ParameterRole]:
    """The role of each trainable parameter, by name.

    It has no weight decay if the recipe says so, by its kind or by its name, or if the model declares it.

    Raises:
        ConfigError: A pattern of the recipe matches no name.
    """
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    output = _output_layer(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Several modules may share it: an output layer that is tied is an embedding.
            if parameter not in places or isinstance(module, EMBEDDINGS):
                places[parameter] = (module, name)
    exempt = _declared_without_decay(model)
    by_pattern: dict[str, dict[str, Any]] = {name: {} for name in trainable}
    for field, patterns in plan.name_patterns.items():
        for pattern, value in patterns.items():
            for name in _names_matching(pattern, trainable, f"optimizer.{field}"):
                by_pattern[name].setdefault(field, value)
    roles = {}
    for name, parameter in trainable.items():
        module, own_name = places[parameter]
        kind = _kind_of(module, own_name, output)
        decays = name not in exempt and kind not in plan.optimizer.no_decay and "no_decay_names" not in by_pattern[name]
        # A transposed convolution's weight is no matrix of its outputs.
        convolves = isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)
        roles[name] = ParameterRole(
            kind, tuple(parameter.shape), decays, has_inputs_first(module), convolves, by_pattern[name]
        )
    return roles


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The layer of `transformers`' output embeddings or, in other models, the last one inside a usual name's module.

    Blocks, whose paths have numbers, may have modules of these names, too.
    """
    output = embedding_layer(model, "get_output_embeddings")
    if output is None:
        for path, module in model.named_modules():
            outside_blocks = takewhile(lambda name: not name.isdigit(), path.split("."))
            if OUTPUT_NAMES.intersection(outside_blocks) and [*module.parameters(recurse=False)]:
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
    if isinstance(module, EMBEDDINGS) or name.endswith(POSITIONS_AND_TOKENS):
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


def _names_matching(
    pattern: str, trainable: Collection[str], field: str, taken: Collection[str] = frozenset()
) -> list[str]:
    """The names of trainable parameters that a pattern of a field matches, without those that are taken.

    Raises:
        ConfigError: There are none.
    """
    matched = [name for name in trainable if fnmatchcase(name, pattern) and name not in taken]
    if not matched:
        patterns = [*trainable]
        for name in trainable:
            patterns += [f"{name[:end]}.*" for end, letter in enumerate(name) if letter == "."]
        which = " that an earlier group does not have" if taken else ""
        meant = did_you_mean(pattern, patterns)
        example = min(trainable, key=lambda name: (not name.endswith(".weight"), name))
        raise ConfigError(
            f'{field}: "{pattern}" matches no trainable parameter of the model{which}{meant}; write a pattern of '
            f"names, such as {example}"
        )
    return matched
