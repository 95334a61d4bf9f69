"""A recipe on several numbers of processes, under every strategy: memory, traffic, what fits, and what to take."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.model_shape import ModelShape, Strategy
from largebatch.plan.model_states import ModelStates, model_states, optimizer_states
from largebatch.plan.strategies import SHARDS, find_strategy
from largebatch.plan.traffic import Traffic, traffic_of_a_step

GIB = 2**30


@dataclass(frozen=True)
class Option:
    """A strategy on a number of processes."""

    strategy: str
    states: ModelStates  # what the fullest process holds
    traffic: Traffic  # of a step of the largest batch size
    together: int  # bytes, with all of what is beside and the estimated activations where there is an estimate
    fits: bool | None  # whether that is within a GPU's memory; None where no memory was given


@dataclass(frozen=True)
class Column:
    """A number of processes."""

    world_size: int
    problem: str | None = None  # why the recipe cannot be trained on it
    plan: RunPlan | None = None
    options: Sequence[Option] = ()  # one per strategy
    suggested: str | None = None  # the strategy to take; None where no memory was given, or nothing fits
    reason: str | None = None  # why to take it


@dataclass(frozen=True)
class Comparison:
    """A recipe on several numbers of processes."""

    title: str  # the recipe's name
    config: RecipeConfig
    model: ModelShape
    activations: int | None  # estimated bytes of a micro-batch; None without an estimate
    gpu_memory: int | None  # bytes of a GPU; None where it was not given
    columns: Sequence[Column]  # one per number of processes
    left_out: Mapping[str, str] = field(default_factory=dict)  # strategies that are not counted, and why

    def as_data(self) -> dict[str, Any]:
        """All numbers, in bytes, for JSON."""
        return {
            "recipe": self.title,
            "task": self.config.task,
            "precision": self.config.precision,
            "optimizer": self.config.optimizer.name,
            "micro_batch_size": self.config.batch.micro_batch_size,
            "parameters": self.model.elements,
            "estimated_activation_bytes": self.activations,
            "gpu_memory_bytes": self.gpu_memory,
            "left_out": dict(self.left_out),
            "world_sizes": [_column_as_data(column) for column in self.columns],
        }


def compare(
    title: str,
    config: RecipeConfig,
    model: ModelShape,
    strategies: Sequence[Strategy],
    world_sizes: Sequence[int],
    activations: int | None,
    gpu_memory: int | None,
    left_out: Mapping[str, str],
) -> Comparison:
    """Count every strategy on every number of processes; one that the recipe cannot be divided over has its problem."""
    columns = []
    for world_size in world_sizes:
        try:
            plan = resolve(config, world_size)
        except ConfigError as error:
            columns.append(Column(world_size, problem="; ".join(error.problems)))
            continue
        options = [_option(config, plan, model, strategy, activations, gpu_memory) for strategy in strategies]
        suggested, reason = _suggest(options, activations, gpu_memory, config)
        columns.append(Column(world_size, None, plan, options, suggested, reason))
    return Comparison(title, config, model, activations, gpu_memory, columns, left_out)


def _option(
    config: RecipeConfig,
    plan: RunPlan,
    model: ModelShape,
    strategy: Strategy,
    activations: int | None,
    gpu_memory: int | None,
) -> Option:
    micro_batches = plan.gradient_accumulation_steps
    states = model_states(model, strategy, plan.world_size, optimizer_states(plan), micro_batches)
    recomputes = config.compute.activation_checkpointing
    traffic = traffic_of_a_step(model, strategy, plan.world_size, micro_batches, recomputes)
    together = states.with_beside + (activations or 0)
    return Option(strategy.name, states, traffic, together, None if gpu_memory is None else together <= gpu_memory)


def _suggest(
    options: Sequence[Option], activations: int | None, gpu_memory: int | None, config: RecipeConfig
) -> tuple[str | None, str | None]:
    if gpu_memory is None or not options:
        return None, None
    memory = f"{gpu_memory / GIB:.4g} GiB"
    too_large: list[Option] = []
    # What shards least comes first; of those that shard the same, the one that sends least.
    for shards in SHARDS:
        rivals = [option for option in options if find_strategy(option.strategy).shards == shards]
        fitting = sorted((option for option in rivals if option.fits), key=lambda option: option.traffic.most)
        if fitting:
            best = fitting[0]
            what = f"model states of {best.states.held / GIB:.3g} GiB"
            if best.states.beside:
                what += f", about {_beside(best) / GIB:.3g} GiB beside them"
            if activations is None:
                what += f" fit in {memory}, of which activations, not estimated, may take the rest"
            else:
                what += f" and an estimated {activations / GIB:.3g} GiB of activations fit in {memory}"
            needs = ", ".join(f"{option.strategy} needs {option.together / GIB:.3g} GiB" for option in too_large)
            others = "; it sends least of those that fit" if _sends_least(best, options) else ""
            return best.strategy, f"{what}{others}{f'; {needs}' if needs else ''}"
        too_large += rivals
    least = min(options, key=lambda option: option.together)
    remedies = ["more processes", "a smaller batch.micro_batch_size"]
    if not config.compute.activation_checkpointing:
        remedies.append("compute.activation_checkpointing")
    return None, (
        f"nothing fits in {memory}; {least.strategy} needs least, {least.together / GIB:.3g} GiB: try "
        f"{', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _beside(option: Option) -> int:
    return option.states.with_beside - option.states.held


def _sends_least(best: Option, options: Sequence[Option]) -> bool:
    return best.traffic.most == min(option.traffic.most for option in options if option.fits)


def _column_as_data(column: Column) -> dict[str, Any]:
    if column.plan is None:
        return {"world_size": column.world_size, "problem": column.problem}
    return {
        "world_size": column.world_size,
        "problem": None,
        "gradient_accumulation_steps": column.plan.gradient_accumulation_steps,
        "suggested": column.suggested,
        "reason": column.reason,
        "strategies": {option.strategy: _option_as_data(option, column.world_size) for option in column.options},
    }


def _option_as_data(option: Option, world_size: int) -> dict[str, Any]:
    kinds = asdict(option.states)
    beside = kinds.pop("beside")
    sent = option.traffic.sent(world_size)
    return {
        "model_state_bytes": kinds | {"together": option.states.held},
        "bytes_beside_about": beside,
        "bytes_together_about": option.together,
        "fits": option.fits,
        "sent_bytes_per_step": {"least": sent[0], "most": sent[1]},
    }
