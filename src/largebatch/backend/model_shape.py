"""A model as plans count it: shapes, the groups of its optimizer, and the units that FSDP2 gathers at once."""

from collections import Counter

from accelerate.utils.fsdp_utils import _find_final_norm, get_module_class_from_name
from torch import nn

from largebatch.backend.native import sharded_apart
from largebatch.model.embedding_layers import embedding_layer
from largebatch.optim.build import planned_groups
from largebatch.plan import RunPlan
from largebatch.plan.model_shape import ModelShape, ParameterShape


def shape_of(model: nn.Module, plan: RunPlan) -> ModelShape:
    """What the plan's memory and traffic depend on, of a model as the recipe builds it; it needs no memory.

    Args:
        model: On any device, and before `prepare`.
        plan: Decides the optimizer's groups.
    """
    groups = {
        parameter: number for number, group in enumerate(planned_groups(model, plan)) for parameter in group["params"]
    }
    modules = Counter(parameter for module in model.modules() for parameter in set(module.parameters(recurse=False)))
    units, gathered = _fsdp_units(model)
    parameters = tuple(
        ParameterShape(name, tuple(parameter.shape), groups.get(parameter), units[parameter], modules[parameter])
        for name, parameter in model.named_parameters()
    )
    return ModelShape(
        parameters,
        gathered,
        buffer_bytes=sum(buffer.nbytes for buffer in set(model.buffers())),
        element_bytes=max(parameter.element_size() for parameter in model.parameters()),
    )


def _fsdp_units(model: nn.Module) -> tuple[dict[nn.Parameter, int], frozenset[int]]:
    """The number of each parameter's unit, as Accelerate makes them, and those that are not gathered a second time.

    Blocks and embeddings are units of their own; the final norm with the output layer (the tail), and all the rest
    (the root), stay gathered from the forward to the backward pass.
    """
    with sharded_apart(model):
        names = getattr(model, "_no_split_modules", None) or ()
        kinds = tuple(kind for kind in (get_module_class_from_name(model, name) for name in names) if kind)
        apart = [[module] for module in reversed([*model.modules()][1:]) if isinstance(module, kinds)]
        given = embedding_layer(model, "get_input_embeddings")
        output = embedding_layer(model, "get_output_embeddings")
        tied = given is not None and getattr(given, "weight", None) is getattr(output, "weight", model)
        if given is not None and not tied:
            apart.append([given])
        tail = [_find_final_norm(model), output]
    units: dict[nn.Parameter, int] = {}
    for number, modules in enumerate([*apart, [module for module in tail if module is not None], [model]]):
        for module in modules:
            for parameter in module.parameters():
                units.setdefault(parameter, number)
    return units, frozenset({len(apart), len(apart) + 1})
