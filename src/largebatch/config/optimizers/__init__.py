"""The optimizers that a recipe may name: what their JSON sections share, and the registry. Each other file in this
folder registers an optimizer.

An entry declares all that configs, plans, `verify` and checkpoints know about an optimizer. It does not import torch:
its constructor is given by name. A task's `config.py` may register entries of its own.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, Union, get_args

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from largebatch.batch.scaling import MomentRule
from largebatch.config.sections import BelowOne, NonNegativeFloat, PositiveFloat, Section
from largebatch.errors import UserError, did_you_mean
from largebatch.task_folders import owner_of

ParameterKind = Literal["norm", "bias", "embedding"]

# --- JSON sections ------------------------------------------------------------------------------------------------


class OptimizerSection(Section):
    """The fields that every optimizer has; those of a subclass are the options that its constructor is called with."""

    name: str
    """Name of the optimizer."""
    weight_decay: NonNegativeFloat
    """Weight decay: an L2 penalty added to the gradient, or decoupled from it, as is usual for the optimizer."""
    no_decay: list[ParameterKind] = Field(default=["norm", "bias"])
    """Kinds of parameters without weight decay; layer-wise optimizers do not adapt their steps either."""
    clip_norm: PositiveFloat | None = None
    """Clip gradients to this global norm; null means no clipping, on every strategy."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the optimizer's constructor, as tuned."""
        return self.model_dump(exclude={*OptimizerSection.model_fields})


class WithMomentum(OptimizerSection):
    """An optimizer with momentum in torch's form: the learning rate is not folded into the velocity, so it may change
    at each step without momentum correction (Goyal et al. 2017, remark 2)."""

    momentum: BelowOne = 0.9
    """Momentum coefficient."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set momentum, or nesterov to false")
        return self


class WithBetas(OptimizerSection):
    """An optimizer of the Adam family."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""


class WithScaledBetas(WithBetas):
    """An optimizer of the Adam family whose betas and eps may follow the batch size."""

    beta_scaling: MomentRule = "fixed"
    """How betas and eps follow the batch size, which is k times `learning_rate.reference_batch_size`, the one they
    were tuned at. "fixed": they do not. "half_life": the second beta is raised to the power k, which keeps its
    half-life in samples (Marek et al. 2025, arXiv 2507.07101). "sde": each beta becomes 1 - k (1 - beta), and eps is
    divided by the square root of k, to go with the square-root rule of the learning rate (Malladi et al. 2022, arXiv
    2205.10287)."""

    @property
    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={*OptimizerSection.model_fields, "beta_scaling"})


# --- entries ------------------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class OptimizerEntry:
    """Everything there is to know about an optimizer.

    Args:
        section: Its section of a recipe's JSON, with a field `name: Literal["…"]`.
        constructor: "module:name" of a class or function that is called with parameter groups, `lr=0.0` and the options
            (the section's own fields), and returns a torch optimizer.
        states: A function of the options and the shape of a tensor that it steps, which may be a part of a parameter or
            of several. It returns the shapes of the states kept for the tensor, by name; () means a scalar. Only an
            optimizer that needs whole matrices may keep states of other shapes than the tensor's.
        tolerance: How far rounding may move a run, for `verify`.
        needs: "elements": each element of a parameter is stepped by itself. "norms of layers": the optimizer is an
            `optim.layerwise.LayerwiseOptimizer`. "whole matrices": it must see each parameter in its own shape; refused
            on strategies that cut parameters up.
        explanation: A line that the plan adds to the optimizer's name and options.
        constants: Further constructor options, which affect speed but not results.
    """

    section: type[OptimizerSection]
    constructor: str
    states: Callable[[Options, Shape], Mapping[str, Shape]]
    tolerance: Tolerance
    needs: Literal["elements", "norms of layers", "whole matrices"] = "elements"
    explanation: str = ""
    constants: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that recipes use."""
        (name,) = get_args(self.section.model_fields["name"].annotation)
        return str(name)


def momentum_buffer(options: Options, shape: Shape) -> Mapping[str, Shape]:
    """The states of SGD with or without momentum."""
    return {"momentum_buffer": shape} if options["momentum"] else {}


def adam_moments(_: Options, shape: Shape) -> Mapping[str, Shape]:
    """The states of Adam."""
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


# --- the registry -------------------------------------------------------------------------------------------------

_registered: dict[str | None, dict[str, tuple[OptimizerEntry, str]]] = {None: {}}
"""Entries by name, with the "file:line" that registered them, by the package of the task's folder; None means every
task."""
_shown: str | None = None
"""The package of the task's folder whose entries are visible in addition to those of every task."""


def register_optimizer(entry: OptimizerEntry) -> None:
    """Make an optimizer known to configs, plans, `verify` and checkpoints: for one task if its `config.py` calls this,
    and otherwise for every task.

    The same line may register again, as when a module is imported a second time.

    Raises:
        UserError: Another optimizer has the same name, or the entry's section has no name.
    """
    frame = sys._getframe(1)
    owner, place = owner_of(str(frame.f_globals["__name__"])), f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if len(get_args(entry.section.model_fields["name"].annotation)) != 1:
        raise UserError(f'{place}: {entry.section.__name__} has no name; give it a field name: Literal["…"]')
    own = _registered.setdefault(owner, {})
    for known in (own, _registered[None]):
        _, other = known.get(entry.name, (entry, place))
        if other != place:
            raise UserError(f'two optimizers have the name "{entry.name}": {other} and {place}; rename one of them')
    own[entry.name] = (entry, place)


def show_optimizers_of(owner: str | None) -> None:
    """Make the optimizers of one task visible, given the package of its folder, in addition to those of every task."""
    global _shown
    _shown = owner


def registered_optimizers(owner: str | None = None) -> list[OptimizerEntry]:
    """The entries that a task sees, sorted by name; None means the task shown last."""
    seen = _registered[None] | _registered.get(owner or _shown, {})
    return [entry for _, (entry, _) in sorted(seen.items())]


def find_optimizer(name: str, owner: str | None = None) -> OptimizerEntry:
    """The entry with a name, as a task sees it; None means the task shown last.

    Raises:
        UserError: There is none, for example because the plan was made where other optimizers were registered.
    """
    seen = {entry.name: entry for entry in registered_optimizers(owner)}
    if name not in seen:
        raise UserError(f'no optimizer "{name}" is registered{did_you_mean(name, seen)}; known: {", ".join(seen)}')
    return seen[name]


class AnyOptimizer:
    """Annotates the `optimizer` field of configs: the section of any optimizer that is registered when the class of
    the config is built or rebuilt (`config.recipe.RecipeConfig.with_optimizers`)."""

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = tuple(entry.section for entry in registered_optimizers())
        return handler.generate_schema(Annotated[Union[sections], Field(discriminator="name")])  # noqa: UP007


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
