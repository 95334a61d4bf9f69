"""The units into which Accelerate divides a model for FSDP2, and the model's shapes as estimates count them.

Each unit is sharded and gathered as a whole. Its hooks take time of the host in every pass: 36 ms a micro-batch for the
21 units of a ResNet-18 whose parts were units, where its kernels took 3 (bench/results/gpu). So small parts are joined.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate.utils.fsdp_utils import get_module_class_from_name
from torch import nn
from torch.distributed.fsdp import FSDPModule

from largebatch.backend.accelerate_internals import find_final_norm
from largebatch.backend.gathers import weights_in_bf16
from largebatch.estimate.model_shape import ModelShape, ParameterShape
from largebatch.model.parts import EMBEDDING_GETTERS, embedding_layer, lists_of_blocks
from largebatch.optim import planned_groups
from largebatch.plan import RunPlan

MIN_UNIT = 2**20
"""Parameters of a part of a block, on average, below which the blocks are the units."""


@contextmanager
def shardable_parts(model: nn.Module) -> Iterator[None]:
    """Within this context, let Accelerate form units only from parts of a model that share no parameter with the rest.

    Candidates are the blocks that the model names and the embeddings that it returns. Some `transformers` models name
    as a block an embedding that shares its weight with the output layer, which FSDP would silently split in two. Others
    raise an error instead of returning no embedding, or return a part of a block, which is sharded with the block.
    """
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = {name: [module for module in model.modules() if type(module).__name__ == name] for name in names}
    blocks = {name: found for name, found in blocks.items() if all(_shares_nothing(model, [each]) for each in found)}
    repeated = [block for list_of_blocks in lists_of_blocks(model) for block in list_of_blocks]
    inside = {part for block in repeated for part in block.modules() if part is not block}
    small = {name for name, found in blocks.items() if not inside.isdisjoint(found) and _are_small(found)}
    if small:
        blocks = {name: found for name, found in blocks.items() if name not in small}
        blocks |= {type(block).__name__: repeated for block in repeated}
    parts = [part for found in blocks.values() for block in found for part in block.modules() if part is not block]
    embeddings = {getter: embedding_layer(model, getter) for getter in EMBEDDING_GETTERS}
    unusable = [name for name, found in embeddings.items() if found is None or any(found is part for part in parts)]
    # Embeddings that share their weights with each other become one unit.
    if not _shares_nothing(model, [found for found in embeddings.values() if found is not None]):
        unusable = [*embeddings]
    replaced = {"_no_split_modules": list(blocks)} | {name: lambda: None for name in unusable}
    before = {name: value for name, value in vars(model).items() if name in replaced}
    vars(model).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(model)[name]
        vars(model).update(before)


def _are_small(modules: Sequence[nn.Module]) -> bool:
    elements = sum(parameter.numel() for module in modules for parameter in module.parameters())
    return elements < MIN_UNIT * len(modules)


def _shares_nothing(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether no parameter of these modules also belongs to another module of the model."""
    inside = {part for module in modules for part in module.modules()}
    theirs = {parameter for module in modules for parameter in module.parameters()}
    others = (module for module in model.modules() if module not in inside)
    return not any(parameter in theirs for other in others for parameter in other.parameters(recurse=False))


def fsdp_units(model: nn.Module) -> tuple[dict[nn.Parameter, int], frozenset[int]]:
    """Return the number of each parameter's unit, as Accelerate forms them, and the units that are gathered only once.

    Each block and each embedding is a unit. The tail (the final norm and the output layer) and the root (everything
    else) stay gathered from the forward to the backward pass, and so does an embedding (see `gather_once`).
    """
    once: set[int] = set()
    with shardable_parts(model):
        names = getattr(model, "_no_split_modules", None) or ()
        kinds = tuple(kind for kind in (get_module_class_from_name(model, name) for name in names) if kind)
        apart = [[module] for module in reversed([*model.modules()][1:]) if isinstance(module, kinds)]
        given, output = (embedding_layer(model, getter) for getter in EMBEDDING_GETTERS)
        tied = given is not None and getattr(given, "weight", None) is getattr(output, "weight", model)
        if given is not None and not tied:
            if isinstance(given, nn.Embedding):
                once.add(len(apart))
            apart.append([given])
        tail = [find_final_norm(model), output]
    units: dict[nn.Parameter, int] = {}
    for number, modules in enumerate([*apart, [module for module in tail if module is not None], [model]]):
        for module in modules:
            for parameter in module.parameters():
                units.setdefault(parameter, number)
    return units, frozenset({*once, len(apart), len(apart) + 1})


def gather_once(model: nn.Module) -> None:
    """Keep the embedding of a sharded model gathered from the forward to the backward pass.

    Its backward pass does not use the weight, so gathering it again would be useless.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and isinstance(module, nn.Embedding):
            module.set_reshard_after_forward(False)


def shape_of(model: nn.Module, plan: RunPlan) -> ModelShape:
    """The properties of a model, on any device and before `prepare`, that a plan's memory and traffic depend on."""
    planned = planned_groups(model, plan)
    options = tuple({name: option for name, option in group.items() if name != "params"} for group in planned)
    groups = {parameter: number for number, group in enumerate(planned) for parameter in group["params"]}
    modules = Counter(parameter for module in model.modules() for parameter in set(module.parameters(recurse=False)))
    units, gathered = fsdp_units(model)
    in_bf16 = weights_in_bf16(model, plan)
    parameters = tuple(
        ParameterShape(
            name,
            tuple(parameter.shape),
            groups.get(parameter),
            units[parameter],
            modules[parameter],
            in_bf16=parameter in in_bf16 or parameter.dtype == torch.bfloat16,
            stored_in_bf16=parameter.dtype == torch.bfloat16,
        )
        for name, parameter in model.named_parameters()
    )
    return ModelShape(
        parameters,
        gathered,
        buffer_bytes=sum(buffer.nbytes for buffer in set(model.buffers())),
        element_bytes=max(parameter.element_size() for parameter in model.parameters()),
        group_options=options,
    )
