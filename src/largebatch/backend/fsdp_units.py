"""The units in which FSDP2 shards and gathers a model, and the model's shapes as estimates count them.

Each unit is sharded and gathered as a whole. Its hooks take time of the host in every pass: 36 ms a micro-batch for the
21 units of a ResNet-18 whose parts were units, where its kernels took 3 (bench/results/gpu). So a part of a block
is not a unit.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from largebatch.backend.accelerate_internals import find_final_norm
from largebatch.backend.batch_norm import RunningStatistics
from largebatch.backend.gathers import weights_in_bf16
from largebatch.estimate.model_shape import ModelShape, ParameterShape
from largebatch.model.parts import EMBEDDING_GETTERS, embedding_layer, repeated_blocks
from largebatch.optim import planned_groups
from largebatch.plan import RunPlan


class Unit(NamedTuple):
    """Modules whose parameters are sharded and gathered together, except for those of units inside them."""

    modules: list[nn.Module]
    gathered_once: bool  # whether it stays gathered from the forward to the backward pass, whatever the launch says


def fsdp_units(model: nn.Module) -> list[Unit]:
    """The units of a model, in the order in which they are sharded: inner ones first, the model itself last.

    Each block is a unit, and so is each embedding, whose backward pass does not use its weight. The tail (the final
    norm and the output layer) is used last and first, and everything else first and last, so they stay gathered, too.
    Embeddings that share their weight with each other are in the tail.
    """
    blocks = _blocks(model)
    layers = [embedding_layer(model, getter) for getter in EMBEDDING_GETTERS]
    stand_alone = _shares_nothing(model, [layer for layer in layers if layer is not None])
    # Some models of `transformers` return a part of a block, which is sharded with the block.
    parts = {part for block in blocks for part in block.modules() if part is not block}
    embedding, output = (layer if stand_alone and layer not in parts else None for layer in layers)
    inner = [module for module in reversed([*model.modules()]) if module in blocks]
    tail = [find_final_norm(model)]
    if embedding is not None and getattr(embedding, "weight", None) is getattr(output, "weight", model):
        tail.append(embedding)
    elif embedding is not None and embedding not in blocks:
        inner.append(embedding)
    tail.append(output)
    units = [Unit([module], isinstance(module, nn.Embedding)) for module in inner]
    last = [module for module in tail if module is not None and module not in blocks]
    if last:
        units.append(Unit(last, gathered_once=True))
    return [*units, Unit([model], gathered_once=True)]


def _blocks(model: nn.Module) -> set[nn.Module]:
    """The blocks that a model names, or repeats if it names parts of them.

    Those that share a parameter with another part of the model are left out: some models of `transformers` name an
    embedding that shares its weight with the output layer.
    """
    repeated = repeated_blocks(model)
    inside = {part for block in repeated for part in block.modules() if part is not block}
    blocks: set[nn.Module] = set()
    for name in getattr(model, "_no_split_modules", None) or ():
        named = [module for module in [*model.modules()][1:] if type(module).__name__ == name]
        if all(_shares_nothing(model, [module]) for module in named):
            blocks.update(named if inside.isdisjoint(named) else repeated)
    return blocks


def _shares_nothing(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether no parameter of these modules also belongs to another module of the model."""
    inside = {part for module in modules for part in module.modules()}
    theirs = {parameter for module in modules for parameter in module.parameters()}
    others = (module for module in model.modules() if module not in inside)
    return not any(parameter in theirs for other in others for parameter in other.parameters(recurse=False))


def shape_of(model: nn.Module, plan: RunPlan) -> ModelShape:
    """The properties of a model, on any device and before `prepare`, that a plan's memory and traffic depend on."""
    planned = planned_groups(model, plan)
    options = tuple({name: option for name, option in group.items() if name != "params"} for group in planned)
    groups = {parameter: number for number, group in enumerate(planned) for parameter in group["params"]}
    modules = Counter(parameter for module in model.modules() for parameter in set(module.parameters(recurse=False)))
    units = fsdp_units(model)
    numbers: dict[nn.Parameter, int] = {}
    for number, unit in enumerate(units):
        for module in unit.modules:
            for parameter in module.parameters():
                numbers.setdefault(parameter, number)
    in_bf16 = weights_in_bf16(model, plan)
    parameters = tuple(
        ParameterShape(
            name,
            tuple(parameter.shape),
            groups.get(parameter),
            numbers[parameter],
            modules[parameter],
            in_bf16=parameter in in_bf16 or parameter.dtype == torch.bfloat16,
            stored_in_bf16=parameter.dtype == torch.bfloat16,
        )
        for name, parameter in model.named_parameters()
    )
    return ModelShape(
        parameters,
        frozenset(number for number, unit in enumerate(units) if unit.gathered_once),
        buffer_bytes=sum(buffer.nbytes for buffer in set(model.buffers())) + RunningStatistics(model).copied_bytes,
        element_bytes=max(parameter.element_size() for parameter in model.parameters()),
        group_options=options,
        exchanged_groups=frozenset(number for number in range(len(options)) if plan.exchanges_layers(options[number])),
    )
