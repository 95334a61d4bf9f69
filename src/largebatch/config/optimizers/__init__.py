"""Optimizers: an entry declares all that configs, plans, `verify` and checkpoints know about one.

Each entry of the package has a file, and `shipped` lists them; a task's `Config` may list entries of its own. What a
recipe's JSON may say is in `sections`. An entry does not import torch: its constructor is given by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args

from pydantic import Field

from largebatch.config.optimizers.sections import OptimizerSection, ParameterKind

Options = Mapping[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tolerance:
    """The largest relative difference of losses, weights and evaluations that rounding makes in a few steps."""

    fp64: float
    fp32: float
    bf16: float


ROUNDING = Tolerance(fp64=1e-12, fp32=1e-6, bf16=1e-4)
"""For an optimizer whose step is proportional to the gradient."""
ENLARGED_ROUNDING = Tolerance(fp64=1e-10, fp32=1e-5, bf16=1e-4)
"""For one that divides by the root of a second moment, as Adam does."""


class ParameterRole(NamedTuple):
    """What a parameter is in its model; an optimizer may decide its parameter group by this."""

    kind: ParameterKind | None  # None for ordinary weights, such as matrices inside blocks
    shape: Shape
    decays: bool  # whether the recipe and the model give it weight decay, if there is any
    inputs_first: bool = False  # whether its module's inputs, not its outputs, are the first dimension, as in GPT-2
    convolves: bool = False  # whether its module is a convolution that is not transposed
    # What the section's `name_patterns` say of its name, by field.
    named: Mapping[str, Any] = MappingProxyType({})


GroupOptions = Mapping[str, Any]

EMA = "ema"
"""The name of the moving average of weights, among the states of an optimizer and in the names of evaluated values."""


def adapt_if_decayed(role: ParameterRole) -> GroupOptions:
    """The group option of layer-wise optimizers: parameters without weight decay are not adapted."""
    return {"layerwise": role.decays}


@dataclass(frozen=True)
class OptimizerEntry:
    """Everything there is to know about an optimizer.

    Args:
        section: Its section of a recipe's JSON, with a field `name: Literal["…"]`.
        constructor: "module:name" of a class or function that is called with parameter groups, `lr=0.0` and the options
            (the section's own fields), and returns a torch optimizer.
        states: A function of the options, with those of the parameter group, and the shape of a tensor that it steps,
            which may be a part of a parameter or of several. It returns the shapes of the states kept for the tensor,
            by name; () means a scalar. Only an optimizer that needs whole matrices may keep states of other shapes than
            the tensor's.
        tolerance: How far rounding may move a run, for `verify`.
        needs: "elements": each element of a parameter is stepped by itself. "norms of layers", "whole layers": the
            optimizer is an `optim.layerwise.LayerwiseOptimizer`, which is told where the parts of layers are. For
            groups with `layerwise`, it sums numbers over processes, or puts each layer together on one of them. "whole
            matrices": it must see each parameter in its own shape; refused on strategies that cut parameters up.
        group_of: A function of a parameter's role. It returns the options of the parameter's group besides weight decay
            and rates, such as {"layerwise": True}; parameters with different options are in different groups.
        products: A function as `states`, of an optimizer that needs whole layers. It returns the floating-point
            operations of the matrix products that a step of the layer takes, which are computed in bf16 on GPUs.
        constants: Further constructor options, which affect speed but not results.
    """

    section: type[OptimizerSection]
    constructor: str
    states: Callable[[Options, Shape], Mapping[str, Shape]]
    tolerance: Tolerance
    needs: Literal["elements", "norms of layers", "whole layers", "whole matrices"] = "elements"
    group_of: Callable[[ParameterRole], GroupOptions] = lambda _: {}
    products: Callable[[Options, Shape], int] = lambda *_: 0
    constants: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that recipes use."""
        (name,) = get_args(self.section.model_fields["name"].annotation)
        return str(name)


def union_of_sections(entries: Iterable[OptimizerEntry]) -> Any:
    """The type of a field that holds the section of any one of these optimizers."""
    sections = tuple(entry.section for entry in entries)
    if len(sections) == 1:
        # Pydantic takes a discriminator only between several.
        return sections[0]
    return Annotated[Union[sections], Field(discriminator="name")]  # noqa: UP007


def momentum_buffer(options: Options, shape: Shape) -> Mapping[str, Shape]:
    """The states of SGD with or without momentum."""
    return {"momentum_buffer": shape} if options["momentum"] else {}


def adam_moments(_: Options, shape: Shape) -> Mapping[str, Shape]:
    """The states of Adam."""
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
