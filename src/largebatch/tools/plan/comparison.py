"""A recipe on several numbers of processes, under every strategy: memory, traffic, what should fit, and what to use."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.model_shape import ModelShape, Strategy
from largebatch.plan.model_states import model_states, optimizer_states
from largebatch.plan.reduction import when_reduced
from largebatch.plan.step_time import EXPOSED_SHARE, MFU, Hardware, step_time
from largebatch.plan.strategies import SHARDS, find_strategy
from largebatch.plan.traffic import traffic_of_a_step
from largebatch.tools.plan.gpu_memory import GIB, kept_back

Json = dict[str, Any]

SAME_SPEED = 0.03  # smaller gains in speed do not decide: the model's error is as large (bench/results)


def compare(
    title: str,
    config: RecipeConfig,
    model: ModelShape,
    strategies: Sequence[Strategy],
    world_sizes: Sequence[int],
    activations: int | None,
    gpu_memory: int | None,
    left_out: Mapping[str, str],
    hardware: Hardware | None = None,
    flops: tuple[int, int] | None = None,
) -> Json:
    """Count the bytes of every strategy on every number of processes.

    Args:
        title: The recipe's name.
        config: The recipe.
        model: The shapes of the recipe's model.
        strategies: The strategies to count.
        world_sizes: The numbers of processes; one that the batch cannot be divided over gets a problem instead.
        activations: Estimated bytes of a micro-batch's activations; None without an estimate.
        gpu_memory: Bytes of a GPU; with None, nothing is said about what fits.
        left_out: Strategies that are not counted, with the reasons.
        hardware: The GPUs; with None, nothing is said about time.
        flops: Floating-point operations of a micro-batch's forward and backward pass; None if they are unknown.
    """
    columns: list[Json] = []
    for world_size in world_sizes:
        try:
            plan = resolve(config, world_size)
        except ConfigError as error:
            columns.append({"world_size": world_size, "problem": "; ".join(error.problems)})
            continue
        counted = {
            each.name: _counted(config, plan, model, each, activations, gpu_memory, hardware, flops)
            for each in strategies
            if world_size % each.shards_of(world_size) == 0
        }
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
        "parameters_gathered_in_bf16": sum(each.elements for each in model.parameters if each.in_bf16),
        "estimated_activation_bytes": activations,
        "gpu_memory_bytes": gpu_memory,
        "kept_back_bytes": None if gpu_memory is None else kept_back(gpu_memory),
        "left_out": dict(left_out),
        "hardware": hardware
        and asdict(hardware) | {"mfu": MFU, "exposed_share": EXPOSED_SHARE, "micro_batch_flops": flops and sum(flops)},
        "world_sizes": columns,
    }


def _counted(
    config: RecipeConfig,
    plan: RunPlan,
    model: ModelShape,
    strategy: Strategy,
    activations: int | None,
    gpu_memory: int | None,
    hardware: Hardware | None,
    flops: tuple[int, int] | None,
) -> Json:
    reduced = when_reduced(model, strategy, plan, gpu_memory)
    strategy = replace(strategy, reduces_each=reduced == "each_micro_batch")
    micro_batches, recomputes = plan.gradient_accumulation_steps, config.compute.activation_checkpointing
    states = model_states(model, strategy, plan.world_size, optimizer_states(plan), micro_batches)
    traffic = traffic_of_a_step(model, strategy, plan.world_size, micro_batches, recomputes)
    kinds = asdict(states)
    beside = kinds.pop("beside")
    together = states.held + sum(beside.values()) + (activations or 0)
    between = traffic.sent_between_nodes(hardware.fabric.gpus_per_node) if hardware else None
    time = step_time(traffic, flops, micro_batches, hardware) if hardware and flops else None
    return {
        "processes_of_a_copy": strategy.shards_of(plan.world_size),
        "gradients_reduced": reduced,
        "model_state_bytes": kinds | {"together": states.held},
        "bytes_beside_about": beside,
        "bytes_together_about": together,
        "fits": None if gpu_memory is None else together <= gpu_memory - kept_back(gpu_memory),
        "sent_bytes_per_step": _range(traffic.sent),
        "sent_between_nodes_bytes_per_step": between and _range(between),
        "step_seconds": time and _range(time.seconds),
        "efficiency": time and _range(time.efficiency),
    }


def _range(values: tuple[float, float]) -> Json:
    return dict(zip(("least", "most"), values, strict=True))


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
            f"no strategy is estimated to fit in {memory}; {least} needs the least, about {together(least)}; try "
            f"{', '.join(remedies[:-1])} or {remedies[-1]}"
        )
    timed = all(options[name]["step_seconds"] for name in fitting)
    if timed:
        seconds = {name: sum(options[name]["step_seconds"].values()) / 2 for name in fitting}
        fastest = min(seconds, key=seconds.__getitem__)
        fitting = [name for name in fitting if seconds[name] <= (1 + SAME_SPEED) * seconds[fastest]]
    # Among equally fast strategies, prefer what sends least between nodes, whose network may be slower than its data
    # sheet; then what shards least and, among strategies that shard the same, what sends least.
    between = {name: options[name]["sent_between_nodes_bytes_per_step"]["most"] if timed else 0 for name in fitting}
    best = min(fitting, key=lambda name: (between[name], rank(name), sent(name)))
    reason = f"model states of {options[best]['model_state_bytes']['together'] / GIB:.3g} GiB"
    if beside := options[best]["bytes_beside_about"]:
        reason += f", about {sum(beside.values()) / GIB:.3g} GiB of temporary memory"
    if activations is None:
        reason += f" should fit in {memory}; the rest is for activations, which are not estimated"
    else:
        reason += f" and an estimated {activations / GIB:.3g} GiB of activations should fit in {memory}"
    if timed:
        low, high = options[best]["step_seconds"].values()
        reason += f"; about {low:.3g} to {high:.3g} s per step"
        if best == fastest:
            reason += ", the fastest of those that fit"
        else:
            more = "sends more between nodes" if between[best] < between[fastest] else "shards or sends more"
            reason += f"; {fastest} is faster, but by no more than the estimate's error, and {more}"
    elif sent(best) == min(map(sent, fitting)):
        reason += "; it sends the least of those that fit"
    too_large = [name for name in options if rank(name) < rank(best) and not options[name]["fits"]]
    if too_large:
        reason += "; " + ", ".join(f"{name} needs about {together(name)}" for name in too_large)
    return best, reason
