"""The strategies: a table entry declares all that plan, launch, `verify` and lint know about a strategy.

An entry does not import torch: its backend and formulas are given by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from largebatch.config import RecipeConfig

Engine = Literal["one process", "DDP", "FSDP", "DeepSpeed"]
Policy = Literal["each_micro_batch", "last_micro_batch"]
POLICY_WORDS: Mapping[str, str] = {
    "each_micro_batch": "each micro-batch",
    "last_micro_batch": "the last micro-batch of a step",
}
"""When gradients are reduced, for messages: "with …"."""
Shards = Literal["nothing", "the optimizer", "the optimizer and weights"]
SHARDS: tuple[Shards, ...] = get_args(Shards)


@dataclass(frozen=True)
class StrategyEntry:
    """Everything there is to know about a strategy.

    Args:
        name: Name of the strategy and of its Accelerate config, recipes/accelerate_configs/NAME.yaml.
        engine: What a launch must start; `backend.launch` reads it from the environment.
        backend: "module:class" of its `backend.base.Backend`.
        formulas: Name of the functions in `estimate.memory` and `estimate.traffic` that count what the fullest process
            holds, and what a step sends.
        shards: State that is divided over processes; each holds all of the rest. Strategies that shard more communicate
            more, and are suggested if those that shard less do not fit.
        steps: Kind of tensors that the optimizer steps on a process.
        reduction_policies: When it can reduce gradients, beginning with what "auto" prefers; see `estimate.memory`.
        replicates_shards: Whether groups of processes, such as those of a node, hold a sharded copy of the model each.
        zero_stage: The stage that the DeepSpeed JSON of a launch must have; None for other engines.
    """

    name: str
    engine: Engine
    backend: str
    formulas: str
    shards: Shards
    steps: Literal["whole parameters", "rows of parameters", "flat pieces of several parameters"]
    reduction_policies: tuple[Policy, ...]
    replicates_shards: bool = False
    zero_stage: int | None = None

    def refusal_of(self, config: RecipeConfig) -> str | None:
        """Why it cannot train a recipe, and what to do instead; None if it can."""
        found = self._conflict(config)
        if found is None:
            return None
        why, remedy = found
        others = names_of(lambda other: other._conflict(config) is None)
        return f"{why}; launch with {others}, or {remedy}" if others else f"{why}; {remedy}"

    def _conflict(self, config: RecipeConfig) -> tuple[str, str] | None:
        """Why it cannot train a recipe, and how to change the recipe."""
        optimizer = config.optimizer_entry
        reduce_gradients = config.compute.reduce_gradients
        if config.precision == "fp64" and self.engine == "DeepSpeed":
            why = "DeepSpeed ZeRO keeps its master weights in fp32, but the recipe has precision fp64"
            return why, "set precision fp32"
        if config.model.stores_frozen_in_bf16 and self.engine == "DeepSpeed":
            why = f'model.frozen_dtype is "bf16", but under {self.name} DeepSpeed takes parameters of one dtype only'
            return why, 'write "fp32"'
        if optimizer.needs == "whole matrices" and self.steps != "whole parameters":
            why = f'optimizer "{optimizer.name}" needs whole matrices, but under {self.name} it would step {self.steps}'
            return why, "use another optimizer"
        if reduce_gradients not in ("auto", *self.reduction_policies):
            why = (
                f'compute.reduce_gradients is "{reduce_gradients}", but {self.name} has "{self.reduction_policies[0]}"'
            )
            return why, 'write "auto"'
        return None


def names_of(are_meant: Callable[[StrategyEntry], bool]) -> str:
    """The strategies with a property, for messages: "ddp, zero1 or zero2"."""
    *names, last = [name for name, entry in STRATEGIES.items() if are_meant(entry)] or [""]
    return f"{', '.join(names)} or {last}" if names else last


DDP = StrategyEntry(
    "ddp",
    engine="DDP",
    backend="largebatch.backend.native:DdpBackend",
    formulas="replicated",
    shards="nothing",
    steps="whole parameters",
    reduction_policies=("last_micro_batch",),
)
# It has nothing to reduce, so any policy is right.
SINGLE = replace(DDP, name="single", engine="one process", reduction_policies=("last_micro_batch", "each_micro_batch"))
"""One process, started without a launcher."""
FSDP = StrategyEntry(
    "fsdp",
    engine="FSDP",
    backend="largebatch.backend.fsdp:FsdpBackend",
    formulas="sharded",
    shards="the optimizer and weights",
    steps="rows of parameters",
    reduction_policies=("last_micro_batch", "each_micro_batch"),
)
HSDP = replace(FSDP, name="hsdp", reduction_policies=("each_micro_batch", "last_micro_batch"), replicates_shards=True)
ZERO1 = StrategyEntry(
    "zero1",
    engine="DeepSpeed",
    backend="largebatch.backend.zero:ZeroBackend",
    formulas="zero12",
    shards="the optimizer",
    steps="flat pieces of several parameters",
    reduction_policies=("last_micro_batch",),
    zero_stage=1,
)
ZERO2 = replace(ZERO1, name="zero2", reduction_policies=("each_micro_batch",), zero_stage=2)
ZERO3 = replace(ZERO2, name="zero3", formulas="zero3", shards="the optimizer and weights", zero_stage=3)

STRATEGIES: Mapping[str, StrategyEntry] = {entry.name: entry for entry in (DDP, FSDP, HSDP, ZERO1, ZERO2, ZERO3)}
"""The strategies by name, in the order in which they are shown."""


def find_strategy(name: str) -> StrategyEntry:
    """The entry of a strategy, or of a single process."""
    return SINGLE if name == SINGLE.name else STRATEGIES[name]
