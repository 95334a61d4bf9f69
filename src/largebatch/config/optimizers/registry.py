"""The registry of optimizers: one entry declares all that config, plan, `verify` and checkpoints know of an optimizer.

An entry imports no torch: what computes is named. A task's `config.py` may register entries of its own.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.errors import UserError, did_you_mean
from largebatch.task_folders import owner_of

Options = Mapping[str, Any]
Shape = tuple[int, ...]
States = Callable[[Options, Shape], Mapping[str, Shape]]
Needs = Literal["elements", "norms of layers", "whole matrices"]


@dataclass(frozen=True)
class Tolerance:
    """The relative differences that rounding makes in a few steps, the largest of losses, weights and evaluations."""

    fp64: float
    fp32: float
    bf16: float


ROUNDING = Tolerance(fp64=1e-12, fp32=1e-6, bf16=1e-4)
"""Of an optimizer whose step is proportional to the gradient."""
ENLARGED_ROUNDING = Tolerance(fp64=1e-10, fp32=1e-5, bf16=1e-4)
"""Of one that divides by the root of a second moment, as Adam does."""


@dataclass(frozen=True)
class OptimizerEntry:
    """What there is to know of an optimizer.

    Args:
        section: Its section of a recipe's JSON, with a field `name: Literal["…"]`.
        constructor: "module:name" of a class or function that is called with parameter groups, `lr=0.0` and the options
            (the section's own fields), and returns a torch optimizer.
        states: From the options and the shape of a tensor that it steps, which may be a part of a parameter or of
            several, to the shapes of the states that it keeps for the tensor, by name; () is a single number. Only
            one that needs whole matrices may keep states of other shapes than the tensor's.
        tolerance: What rounding makes of a run, for `verify`.
        needs: "elements": each element of a parameter is stepped by itself. "norms of layers": the optimizer is an
            `optim.layerwise.LayerwiseOptimizer`. "whole matrices": it must see each parameter in its own shape; refused
            on strategies that cut parameters up.
        explanation: A line that the plan adds to the optimizer's name and options.
        constants: Further options of the constructor, which change speed, not numbers.
    """

    section: type[OptimizerSection]
    constructor: str
    states: States
    tolerance: Tolerance
    needs: Needs = "elements"
    explanation: str = ""
    constants: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a recipe calls it."""
        (name,) = get_args(self.section.model_fields["name"].annotation)
        return str(name)


def momentum_buffer(options: Options, shape: Shape) -> Mapping[str, Shape]:
    """The states of SGD with or without momentum."""
    return {"momentum_buffer": shape} if options["momentum"] else {}


def adam_moments(_: Options, shape: Shape) -> Mapping[str, Shape]:
    """The states of Adam."""
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


# --- the registry -------------------------------------------------------------------------------------------------

_registered: dict[str | None, dict[str, OptimizerEntry]] = {None: {}}
"""Entries by name: the package's own and those of other libraries, and those of each task's folder, by its package."""
_places: dict[tuple[str | None, str], str] = {}
"""Where each was registered, as "file:line"."""
_shown: str | None = None
"""The task's folder whose entries are seen besides those of all tasks."""


def register_optimizer(entry: OptimizerEntry) -> None:
    """Make an optimizer known to configs, plans, `verify` and checkpoints: of one task where its `config.py` calls
    this, and else of all.

    To register the same again is allowed, as when a module is imported a second time.

    Raises:
        UserError: Another optimizer has its name, or the entry's section has no name.
    """
    frame = sys._getframe(1)
    owner, place = owner_of(str(frame.f_globals["__name__"])), f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if len(get_args(entry.section.model_fields["name"].annotation)) != 1:
        raise UserError(f'{place}: {entry.section.__name__} does not say its name; give it a field name: Literal["…"]')
    for of in {owner, None}:
        other = _places.get((of, entry.name), place)
        if other != place:
            raise UserError(f'two optimizers have the name "{entry.name}": {other} and {place}; rename one of them')
    _registered.setdefault(owner, {})[entry.name] = entry
    _places[owner, entry.name] = place


def show_optimizers_of(owner: str | None) -> None:
    """See the optimizers of a task's folder, by its package, from now on, besides those of all tasks."""
    global _shown
    _shown = owner


def registered_optimizers(owner: str | None = None) -> list[OptimizerEntry]:
    """All entries that are seen, by name; or those that a task sees, by its folder's package."""
    seen = _registered[None] | _registered.get(owner or _shown, {})
    return [entry for _, entry in sorted(seen.items())]


def find_optimizer(name: str, owner: str | None = None) -> OptimizerEntry:
    """The entry of a name, as a task sees it by its folder's package; None is the task that was shown last.

    Raises:
        UserError: There is none, as where a plan was made with an optimizer that nothing has registered here.
    """
    seen = {entry.name: entry for entry in registered_optimizers(owner)}
    if name not in seen:
        raise UserError(f'no optimizer "{name}" is registered{did_you_mean(name, seen)}; known: {", ".join(seen)}')
    return seen[name]


class AnyOptimizer:
    """Annotates the `optimizer` field of configs: the section of any optimizer that is registered when the class of
    the config is built, or built again; see `config.recipe.RecipeConfig.with_optimizers`."""

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = tuple(entry.section for entry in registered_optimizers())
        return handler.generate_schema(Annotated[Union[sections], Field(discriminator="name")])  # noqa: UP007
