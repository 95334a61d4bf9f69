"""A recipe on several numbers of processes, under every strategy: memory, traffic, what should fit, and what to use."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.model_shape import ModelShape, Strategy
from largebatch.plan.model_states import model_states, optimizer_states
from largebatch.plan.strategies import SHARDS, find_strategy
from largebatch.plan.traffic import traffic_of_a_step
from largebatch.tools.plan.gpu_memory import GIB, kept_back

Json = dict[str, Any]


def compare(
    title: str,
    config: RecipeConfig,
    model: ModelShape,
    strategies: Sequence[Strategy],
    world_sizes: Sequence[int],
    activations: int | None,
    gpu_memory: int | None,
    left_out: Mapping[str, str],
) -> Json:
    """Count the bytes of every strategy on every number of processes.

    Args:
        title: The recipe's name.
        config: The recipe.
        model: Its model.
        strategies: The strategies to count.
        world_sizes: The numbers of processes; one that the batch does not divide over has a problem instead of numbers.
        activations: Estimated bytes of a micro-batch's activations; None without an estimate.
        gpu_memory: Bytes of a GPU; with None, nothing is said about what fits.
        left_out: Strategies that are not counted, with the reasons.
    """
    columns: list[Json] = []
    for world_size in world_sizes:
        try:
            plan = resolve(config, world_size)
        except ConfigError as error:
            columns.append({"world_size": world_size, "problem": "; ".join(error.problems)})
            continue
        counted = {each.name: _counted(config, plan, model, each, activations, gpu_memory) for each in strategies}
        suggested, reason = _suggest(counted, activations, gpu_memory, config)
        columns.append(
            {
                "world_size": world_size,
                "problem": None,
                "gradient_accumulation_steps": plan.gradient_accumulation_steps,
                "suggested": suggested,
                "reason": reason,
                "strategies": counted,
            }
        )
    return {
        "recipe": title,
        "task": config.task,
        "precision": config.precision,
        "optimizer": config.optimizer.name,
        "micro_batch_size": config.batch.micro_batch_size,
        "parameters": model.elements,
        "estimated_activation_bytes": activations,
        "gpu_memory_bytes": gpu_memory,
        "kept_back_bytes": None if gpu_memory is None else kept_back(gpu_memory),
        "left_out": dict(left_out),
        "world_sizes": columns,
    }


def _counted(
    config: RecipeConfig,
    plan: RunPlan,
    model: ModelShape,
    strategy: Strategy,
    activations: int | None,
    gpu_memory: int | None,
) -> Json:
    micro_batches, recomputes = plan.gradient_accumulation_steps, config.compute.activation_checkpointing
    states = model_states(model, strategy, plan.world_size, optimizer_states(plan), micro_batches)
    traffic = traffic_of_a_step(model, strategy, plan.world_size, micro_batches, recomputes)
    least, most = traffic.sent(plan.world_size)
    kinds = asdict(states)
    beside = kinds.pop("beside")
    together = states.held + sum(beside.values()) + (activations or 0)
    return {
        "model_state_bytes": kinds | {"together": states.held},
        "bytes_beside_about": beside,
        "bytes_together_about": together,
        "fits": None if gpu_memory is None else together <= gpu_memory - kept_back(gpu_memory),
        "sent_bytes_per_step": {"least": least, "most": most},
    }


def _suggest(
    options: Mapping[str, Json], activations: int | None, gpu_memory: int | None, config: RecipeConfig
) -> tuple[str | None, str | None]:
    """The strategy to use and the reason; no strategy if nothing fits, and neither if no memory is given."""
    if gpu_memory is None or not options:
        return None, None
    usable = gpu_memory - kept_back(gpu_memory)
    memory = f"{usable / GIB:.4g} of {gpu_memory / GIB:.4g} GiB"

    def together(name: str) -> str:
        return f"{options[name]['bytes_together_about'] / GIB:.3g} GiB"

    def rank(name: str) -> int:
        return SHARDS.index(find_strategy(name).shards)

    def sent(name: str) -> int:
        return int(options[name]["sent_bytes_per_step"]["most"])

    fitting = [name for name in options if options[name]["fits"]]
    if not fitting:
        least = min(options, key=lambda name: options[name]["bytes_together_about"])
        remedies = ["more processes", "a smaller batch.micro_batch_size"]
        if not config.compute.activation_checkpointing:
            remedies.append("compute.activation_checkpointing")
        return None, (
            f"nothing is estimated to fit in {memory}; {least} needs the least, about {together(least)}: try "
            f"{', '.join(remedies[:-1])} or {remedies[-1]}"
        )
    # Prefer what shards least and, among strategies that shard the same, what sends least.
    best = min(fitting, key=lambda name: (rank(name), sent(name)))
    reason = f"model states of {options[best]['model_state_bytes']['together'] / GIB:.3g} GiB"
    if beside := options[best]["bytes_beside_about"]:
        reason += f", about {sum(beside.values()) / GIB:.3g} GiB of temporary memory"
    if activations is None:
        reason += f" should fit in {memory}; activations, which are not estimated, may take the rest"
    else:
        reason += f" and an estimated {activations / GIB:.3g} GiB of activations should fit in {memory}"
    if sent(best) == min(map(sent, fitting)):
        reason += "; it sends the least of those that fit"
    if too_large := [f"{name} needs about {together(name)}" for name in options if rank(name) < rank(best)]:
        reason += f"; {', '.join(too_large)}"
    return best, reason
