"""A recipe on several numbers of processes, under every strategy: memory, traffic, what should fit, and what to use."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.estimate.memory import coupling_phase, model_states, when_reduced
from largebatch.estimate.model_shape import ModelShape, Strategy
from largebatch.estimate.step_time import Hardware, step_time
from largebatch.estimate.traffic import TrafficCase, traffic_of_a_step
from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.layer_owners import layer_owners
from largebatch.plan.strategies import SHARDS, find_strategy
from largebatch.system.hardware import GIB, kept_back

Json = dict[str, Any]

SAME_SPEED = 0.03  # smaller gains in speed do not decide: the model's error is as large (bench/results)


@dataclass(frozen=True)
class Workload:
    """What a process computes and keeps for a micro-batch."""

    model: ModelShape
    activations: int | None = None  # estimated bytes; None without an estimate
    flops: tuple[int, int] | None = None  # operations of the forward and of the backward pass; None if unknown
    not_estimated: str | None = None  # why activations are unknown


def compare_strategies(
    title: str,
    config: RecipeConfig,
    workload: Workload,
    strategies: Sequence[Strategy],
    world_sizes: Sequence[int],
    gpu_memory: int,
    hardware: Hardware | None = None,
    not_counted: Mapping[str, str] = {},
) -> Json:
    """Estimate what every strategy holds and sends on every number of processes.

    Args:
        title: The recipe's name.
        config: The recipe.
        workload: The recipe's model, and what a micro-batch takes.
        strategies: The strategies to count.
        world_sizes: The numbers of processes; one that the batch cannot be divided over gets a problem instead.
        gpu_memory: Bytes of a GPU.
        hardware: The GPUs; with None, nothing is said about time.
        not_counted: Strategies that are not counted, with the reasons.
    """
    columns: list[Json] = []
    for world_size in world_sizes:
        try:
            plan = resolve(config, world_size)
        except ConfigError as error:
            columns.append({"world_size": world_size, "problem": "; ".join(error.problems)})
            continue
        counted = {
            each.name: _cost(plan, workload, each, gpu_memory, hardware)
            for each in strategies
            if world_size % each.shards_of(world_size) == 0
        }
        suggested, reason = _suggest(counted, workload.activations, gpu_memory)
        columns.append(
            {
                "world_size": world_size,
                "problem": None,
                "gradient_accumulation_steps": plan.max_gradient_accumulation_steps,
                "samples": plan.total_samples,
                "suggested": suggested,
                "reason": reason,
                "strategies": counted,
            }
        )
    return {
        "recipe": title,
        "parameters": workload.model.elements,
        "micro_batch_size": config.batch.micro_batch_size,
        "estimated_activation_bytes": workload.activations,
        "not_estimated": workload.not_estimated,
        "micro_batch_flops": workload.flops and sum(workload.flops),
        "gpu_memory_bytes": gpu_memory,
        "hardware": hardware and asdict(hardware),
        "not_counted": not_counted,
        "world_sizes": columns,
    }


def _cost(
    plan: RunPlan,
    workload: Workload,
    strategy: Strategy,
    gpu_memory: int,
    hardware: Hardware | None,
) -> Json:
    """What a strategy holds and sends on the plan's number of processes."""
    model = workload.model
    flops = workload.flops
    micro_batches = plan.max_gradient_accumulation_steps
    reduced = when_reduced(model, strategy, plan, gpu_memory)
    strategy = replace(strategy, reduces_each=reduced == "each_micro_batch")
    states = model_states(model, strategy, plan)
    if (coupling := coupling_phase(plan, model.element_bytes)) is not None:
        states = replace(states, phases=[*states.phases, coupling])
    recomputes = plan.compute.activation_checkpointing != "none"
    features = plan.coupled_numbers * model.element_bytes
    traffic = traffic_of_a_step(TrafficCase(model, strategy, plan.world_size, micro_batches, recomputes, features))
    if flops and plan.coupled_features and not plan.encodes_once(micro_batches):
        flops = (2 * flops[0], flops[1])
    kept = workload.activations or 0
    activations = max(0, kept - (0 if recomputes else states.not_cast))
    total, transient = states.peak(activations)
    between = hardware and sum(each.sent_between_nodes(hardware.fabric.gpus_per_node) for each in traffic)
    products = _most_products(plan, model, strategy.shards_of(plan.world_size))
    return {
        "shard_group_size": 1 if strategy.entry.shards == "nothing" else strategy.shards_of(plan.world_size),
        "gradients_reduced": reduced,
        "model_state_bytes": {**states.by_kind, "total": states.held},
        "transient_bytes_estimate": transient,
        "total_bytes_estimate": total,
        "fits": total <= gpu_memory - kept_back(gpu_memory),
        "sent_bytes_per_step": sum(each.sent for each in traffic),
        "sent_between_nodes_bytes_per_step": between,
        "update_flops": products,
        "step_seconds": hardware and flops and step_time(traffic, flops, micro_batches, hardware, kept, products),
    }


def _most_products(plan: RunPlan, model: ModelShape, owners: int) -> int:
    """The operations of matrix products in an update, on the process that has the most of them.

    The rest of an update is element by element, and is not counted. Parameter groups are stepped one after another, and
    each ends with an exchange, in which all wait for the last.

    Args:
        plan: The plan, which has the optimizer.
        model: The model.
        owners: The number of processes that layers are divided over.
    """
    assert plan.optimizer_entry is not None
    total = 0
    for group in model.exchanged_groups:
        options = {**plan.optimizer_options, **model.group_options[group]}
        shapes = {each.name: each.shape for each in model.groups[group]}
        loads = [0] * owners
        for name, owner in layer_owners(shapes, owners).items():
            loads[owner] += plan.optimizer_entry.products(options, shapes[name])
        total += max(loads)
    return total


def _suggest(options: Mapping[str, Json], activations: int | None, gpu_memory: int) -> tuple[str | None, str]:
    """The strategy to use, None if nothing fits, and the reason."""
    memory = f"the usable {(gpu_memory - kept_back(gpu_memory)) / GIB:.4g} of {gpu_memory / GIB:.4g} GiB"
    fitting = {name: option for name, option in options.items() if option["fits"]}
    if not fitting:
        return None, (
            f"no strategy is estimated to fit in {memory}; try more processes, a smaller batch.micro_batch_size or, if "
            "it is off, compute.activation_checkpointing"
        )
    rest = "" if activations is not None else "; the rest is for activations, which are not estimated"
    return _best(fitting), f"it should fit in {memory}{rest}"


def _best(fitting: Mapping[str, Json]) -> str:
    """The best of the strategies that fit: of about the fastest, the one that sends the least between nodes, whose
    network may be slower than its data sheet; then the one that shards, and then sends, the least."""
    seconds = {name: sum((option["step_seconds"] or {}).values()) for name, option in fitting.items()}
    limit = (1 + SAME_SPEED) * min(seconds.values())

    def order(name: str) -> tuple[int, int, int]:
        option = fitting[name]
        # Without a network, the time is not known either.
        between = option["sent_between_nodes_bytes_per_step"] if option["step_seconds"] else 0
        return between, SHARDS.index(find_strategy(name).shards), option["sent_bytes_per_step"]

    return min((name for name in fitting if seconds[name] <= limit), key=order)
