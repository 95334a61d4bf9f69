"""The strategies: a table entry declares all that plan, launch, `verify` and lint know about a strategy.

An entry does not import torch: its backend and formulas are given by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from largebatch.config.optimizers import find_optimizer

Environment = Mapping[str, str]
Engine = Literal["one process", "DDP", "FSDP", "DeepSpeed"]
Shards = Literal["nothing", "the optimizer", "the optimizer and weights"]
SHARDS: tuple[Shards, ...] = get_args(Shards)


class Refusal(NamedTuple):
    """Why something cannot be trained, and what to do instead."""

    why: str
    remedy: str


@dataclass(frozen=True)
class StrategyEntry:
    """Everything there is to know about a strategy.

    Args:
        name: Name of the strategy and of its Accelerate config, recipes/accelerate_configs/NAME.yaml.
        launched: Whether a launch is of this strategy, given the environment that `accelerate launch` sets and the
            stage of the DeepSpeed JSON, if there is one; the first entry that matches is chosen.
        backend: "module:class" of its `backend.base.Backend`.
        memory: "module:function" that counts what the fullest process holds; see `plan.model_states`.
        traffic: "module:function" that counts what a step sends; see `plan.traffic`.
        shards: State that is divided over processes; each holds all of the rest. Strategies that shard more communicate
            more, and are suggested if those that shard less do not fit.
        steps: Kind of tensors that the optimizer steps on a process.
        no_fp64: Why precision "fp64" would not be exact; None if it is.
    """

    name: str
    launched: Callable[[Environment, int | None], bool]
    backend: str
    memory: str
    traffic: str
    shards: Shards
    steps: Literal["whole parameters", "rows of parameters", "flat pieces of several parameters"]
    no_fp64: str | None = None

    def refusal(self, precision: str, optimizer: str | None) -> Refusal | None:
        """Why it cannot train a recipe with this precision and optimizer; None if it can."""
        found = self._conflict(precision, optimizer)
        if found is None:
            return None
        others = names_of(lambda other: other._conflict(precision, optimizer) is None)
        return Refusal(found.why, f"launch with {others}, or {found.remedy}")

    def _conflict(self, precision: str, optimizer: str | None) -> Refusal | None:
        if precision == "fp64" and self.no_fp64:
            return Refusal(f"{self.no_fp64}, but the recipe has precision fp64", "set precision fp32")
        if optimizer and find_optimizer(optimizer).needs == "whole matrices" and self.steps != "whole parameters":
            why = f'optimizer "{optimizer}" needs whole matrices, but under {self.name} it would step {self.steps}'
            return Refusal(why, "use another optimizer")
        return None


def names_of(are_meant: Callable[[StrategyEntry], bool]) -> str:
    """The strategies with a property, for messages: "ddp, zero1 or zero2"."""
    *names, last = [name for name, entry in STRATEGIES.items() if are_meant(entry)]
    return f"{', '.join(names)} or {last}" if names else last


def is_true(environment: Environment, name: str) -> bool:
    """Whether a variable is set to a form of true."""
    return environment.get(name, "false").lower() in ("true", "1", "yes")


def engine_of(environment: Environment) -> Engine:
    """The engine that a process was launched for."""
    if is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        return "DeepSpeed"
    if is_true(environment, "ACCELERATE_USE_FSDP"):
        return "FSDP"
    return "DDP" if "WORLD_SIZE" in environment else "one process"


SINGLE = StrategyEntry(
    "single",
    launched=lambda environment, _: engine_of(environment) == "one process",
    backend="largebatch.backend.native:SingleBackend",
    memory="largebatch.plan.model_states:replicated",
    traffic="largebatch.plan.traffic:replicated",
    shards="nothing",
    steps="whole parameters",
)
"""One process, started without a launcher."""


def _zero(stage: Literal[1, 2, 3]) -> StrategyEntry:
    formula = "zero3" if stage == 3 else "zero12"
    return StrategyEntry(
        f"zero{stage}",
        launched=lambda environment, given: engine_of(environment) == "DeepSpeed" and given == stage,
        backend="largebatch.backend.zero:ZeroBackend",
        memory=f"largebatch.plan.model_states:{formula}",
        traffic=f"largebatch.plan.traffic:{formula}",
        shards="the optimizer and weights" if stage == 3 else "the optimizer",
        steps="flat pieces of several parameters",
        no_fp64="DeepSpeed ZeRO keeps its master weights in fp32",
    )


STRATEGIES: Mapping[str, StrategyEntry] = {
    entry.name: entry
    for entry in (
        StrategyEntry(
            "ddp",
            launched=lambda environment, _: engine_of(environment) == "DDP",
            backend="largebatch.backend.native:DdpBackend",
            memory="largebatch.plan.model_states:replicated",
            traffic="largebatch.plan.traffic:replicated",
            shards="nothing",
            steps="whole parameters",
        ),
        StrategyEntry(
            "fsdp",
            launched=lambda environment, _: engine_of(environment) == "FSDP",
            backend="largebatch.backend.fsdp:FsdpBackend",
            memory="largebatch.plan.model_states:fsdp",
            traffic="largebatch.plan.traffic:fsdp",
            shards="the optimizer and weights",
            steps="rows of parameters",
        ),
        _zero(1),
        _zero(2),
        _zero(3),
    )
}
"""The strategies by name, in the order in which they are shown."""


def find_strategy(name: str) -> StrategyEntry:
    """The entry of a strategy, or of a single process."""
    return SINGLE if name == SINGLE.name else STRATEGIES[name]


def caches_casts(strategy: str, recomputes: bool) -> bool:
    """Whether bf16 autocast keeps its copy of each weight until the end of a forward pass (its `cache_enabled`).

    It would keep a copy of the whole model where weights are sharded, or where blocks are recomputed and autograd does
    not keep the copies anyway. Without the cache, a weight that several operations use is cast for each of them.

    Args:
        strategy: Name of the strategy.
        recomputes: Whether blocks are computed again in the backward pass (activation checkpointing).
    """
    return not recomputes and "weights" not in find_strategy(strategy).shards
