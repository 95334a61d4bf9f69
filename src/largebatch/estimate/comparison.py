"""A recipe on several numbers of processes, under every strategy: memory, traffic, what should fit, and what to use."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.estimate.hardware import GIB, kept_back
from largebatch.estimate.memory import model_states, optimizer_states, when_reduced
from largebatch.estimate.model_shape import ModelShape, Strategy
from largebatch.estimate.step_time import EXPOSED_SHARE, MFU, Hardware, step_time
from largebatch.estimate.traffic import traffic_of_a_step
from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.strategies import SHARDS, find_strategy

Json = dict[str, Any]

SAME_SPEED = 0.03  # smaller gains in speed do not decide: the model's error is as large (bench/results)


@dataclass(frozen=True)
class Workload:
    """What a process computes and keeps for a micro-batch."""

    model: ModelShape
    activations: int | None = None  # estimated bytes; None without an estimate
    flops: tuple[int, int] | None = None  # operations of the forward and of the backward pass; None if unknown


def compare_strategies(
    title: str,
    config: RecipeConfig,
    workload: Workload,
    strategies: Sequence[Strategy],
    world_sizes: Sequence[int],
    gpu_memory: int | None = None,
    hardware: Hardware | None = None,
    not_counted: Mapping[str, str] | None = None,
) -> Json:
    """Estimate what every strategy holds and sends on every number of processes.

    Args:
        title: The recipe's name.
        config: The recipe.
        workload: The recipe's model, and what a micro-batch takes.
        strategies: The strategies to count.
        world_sizes: The numbers of processes; one that the batch cannot be divided over gets a problem instead.
        gpu_memory: Bytes of a GPU; with None, nothing is said about what fits.
        hardware: The GPUs; with None, nothing is said about time.
        not_counted: Strategies that are not counted, with the reasons.
    """
    model, flops = workload.model, workload.flops
    columns: list[Json] = []
    for world_size in world_sizes:
        try:
            plan = resolve(config, world_size)
        except ConfigError as error:
            columns.append({"world_size": world_size, "problem": "; ".join(error.problems)})
            continue
        counted = {
            each.name: _cost(config, plan, workload, each, gpu_memory, hardware)
            for each in strategies
            if world_size % each.shards_of(world_size) == 0
        }
        suggested, reason = _suggest(counted, workload.activations, gpu_memory)
        columns.append(
            {
                "world_size": world_size,
                "problem": None,
                "gradient_accumulation_steps": plan.max_gradient_accumulation_steps,
                "samples": plan.timeline.at(plan.total_steps).samples_before,
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
        "estimated_activation_bytes": workload.activations,
        "gpu_memory_bytes": gpu_memory,
        "kept_back_bytes": None if gpu_memory is None else kept_back(gpu_memory),
        "not_counted": dict(not_counted or {}),
        "hardware": hardware
        and asdict(hardware) | {"mfu": MFU, "exposed_share": EXPOSED_SHARE, "micro_batch_flops": flops and sum(flops)},
        "world_sizes": columns,
    }


def _cost(
    config: RecipeConfig,
    plan: RunPlan,
    workload: Workload,
    strategy: Strategy,
    gpu_memory: int | None,
    hardware: Hardware | None,
) -> Json:
    """What a strategy holds and sends on the plan's number of processes."""
    model, flops, micro_batches = workload.model, workload.flops, plan.max_gradient_accumulation_steps
    entry = find_strategy(strategy.name)
    reduced = when_reduced(model, strategy, plan, gpu_memory)
    strategy = replace(strategy, reduces_each=reduced == "each_micro_batch", ddp_bucket_mib=plan.ddp_bucket_mib)
    states = model_states(model, strategy, plan.world_size, optimizer_states(plan), micro_batches)
    recomputes = config.compute.activation_checkpointing != "none"
    traffic = traffic_of_a_step(model, strategy, plan.world_size, micro_batches, recomputes)
    held = asdict(states)
    transient = held.pop("transient")
    total = states.peak + (workload.activations or 0)
    between = hardware and sum(each.sent_between_nodes(hardware.fabric.gpus_per_node) for each in traffic)
    cost: Json = {
        "shard_group_size": 1 if entry.shards == "nothing" else strategy.shards_of(plan.world_size),
        "gradients_reduced": reduced,
        "model_state_bytes": held | {"total": states.held},
        "transient_bytes_estimate": transient,
        "total_bytes_estimate": total,
        "fits": None if gpu_memory is None else total <= gpu_memory - kept_back(gpu_memory),
        "sent_bytes_per_step": sum(each.sent for each in traffic),
        "sent_between_nodes_bytes_per_step": between,
    }
    if hardware and flops:
        return cost | step_time(traffic, flops, micro_batches, hardware, workload.activations or 0)
    return cost | {"step_seconds": None, "efficiency": None}


def _suggest(
    options: Mapping[str, Json], activations: int | None, gpu_memory: int | None
) -> tuple[str | None, str | None]:
    """The strategy to use and the reason; no strategy if nothing fits, and neither if no memory is given."""
    if gpu_memory is None or not options:
        return None, None
    memory = f"{(gpu_memory - kept_back(gpu_memory)) / GIB:.4g} of {gpu_memory / GIB:.4g} GiB"
    fitting = [name for name in options if options[name]["fits"]]
    if not fitting:
        least = min(options, key=lambda name: options[name]["total_bytes_estimate"])
        return None, (
            f"no strategy is estimated to fit in {memory}; {least} needs the least, about "
            f"{options[least]['total_bytes_estimate'] / GIB:.3g} GiB; try more processes, a smaller "
            "batch.micro_batch_size or, if it is off, compute.activation_checkpointing"
        )
    best, advantage = _best({name: options[name] for name in fitting})
    reason = f"model states of {options[best]['model_state_bytes']['total'] / GIB:.3g} GiB"
    if transient := options[best]["transient_bytes_estimate"]:
        reason += f", about {sum(transient.values()) / GIB:.3g} GiB of transient memory"
    if activations is None:
        reason += f" should fit in {memory}; the rest is for activations, which are not estimated"
    else:
        reason += f" and an estimated {activations / GIB:.3g} GiB of activations should fit in {memory}"
    return best, "; ".join(part for part in (reason, advantage) if part)


def _best(fitting: Mapping[str, Json]) -> tuple[str, str]:
    """The best of the strategies that fit, and what it has over the others; "" if nothing is known."""

    def sent(name: str) -> int:
        return int(fitting[name]["sent_bytes_per_step"])

    if not all(option["step_seconds"] for option in fitting.values()):
        best = min(fitting, key=lambda name: (_rank(name), sent(name)))
        return best, "it sends the least of those that fit" if sent(best) == min(map(sent, fitting)) else ""
    seconds = {name: sum(option["step_seconds"].values()) / 2 for name, option in fitting.items()}
    fastest = min(seconds, key=seconds.__getitem__)
    fast = [name for name in fitting if seconds[name] <= (1 + SAME_SPEED) * seconds[fastest]]
    # Among equally fast strategies, prefer what sends least between nodes, whose network may be slower than its data
    # sheet; then what shards least and, among strategies that shard the same, what sends least.
    between = {name: fitting[name]["sent_between_nodes_bytes_per_step"] for name in fast}
    best = min(fast, key=lambda name: (between[name], _rank(name), sent(name)))
    low, high = fitting[best]["step_seconds"].values()
    advantage = f"about {low:.3g} to {high:.3g} s per step"
    if best == fastest:
        return best, f"{advantage}, the fastest of those that fit"
    return best, f"{advantage}; {fastest} is faster, but by no more than the estimate's error, and sends or shards more"


def _rank(name: str) -> int:
    """How much a strategy shards."""
    return SHARDS.index(find_strategy(name).shards)
