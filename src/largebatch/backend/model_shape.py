"""A model as plans count it: its shapes, its optimizer's groups, and the units that FSDP2 gathers at once."""

from collections import Counter

from torch import nn

from largebatch.backend.fsdp_units import fsdp_units
from largebatch.backend.gathers import weights_in_bf16
from largebatch.estimate.model_shape import ModelShape, ParameterShape
from largebatch.optim.build import planned_groups
from largebatch.plan import RunPlan


def shape_of(model: nn.Module, plan: RunPlan) -> ModelShape:
    """The properties of a model, on any device and before `prepare`, that a plan's memory and traffic depend on."""
    groups = {
        parameter: number for number, group in enumerate(planned_groups(model, plan)) for parameter in group["params"]
    }
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
            in_bf16=parameter in in_bf16,
        )
        for name, parameter in model.named_parameters()
    )
    return ModelShape(
        parameters,
        gathered,
        buffer_bytes=sum(buffer.nbytes for buffer in set(model.buffers())),
        element_bytes=max(parameter.element_size() for parameter in model.parameters()),
    )
